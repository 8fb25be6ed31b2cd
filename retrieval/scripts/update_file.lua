-- Changes a member's record if it is still the one that was read.
--
-- KEYS[1] members   KEYS[2] version   KEYS[3] events
-- ARGV[1] file id   ARGV[2] the record as it was read   ARGV[3] the new one   ARGV[4] tenant   ARGV[5] collection id
-- returns 1, or 0 when somebody else was faster
-- cost    O(1)
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 10000, '*', 'tenant', ARGV[4], 'collection', ARGV[5])
return 1
