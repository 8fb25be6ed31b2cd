-- Ends the ingestion of a file: its record becomes what ARGV says, unless it was removed or attached anew meanwhile.
--
-- KEYS[1] members of the collection   KEYS[2] its version   KEYS[3] events   KEYS[4] jobs   KEYS[5] attempts
-- ARGV[1] file id   ARGV[2] the generation it must still have   ARGV[3] the new record   ARGV[4] tenant
-- ARGV[5] collection id   ARGV[6] the job   ARGV[7] '' or the member that leaves in the same moment
-- returns 1, or 0 when the record is another's by now
-- cost    O(1)
redis.call('ZREM', KEYS[4], ARGV[6])
redis.call('HDEL', KEYS[5], ARGV[6])
local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record then return 0 end
local now = cjson.decode(record)
if now.generation ~= ARGV[2] or now.status ~= 'in_progress' then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if ARGV[7] ~= '' then redis.call('HDEL', KEYS[1], ARGV[7]) end
redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 10000, '*', 'tenant', ARGV[4], 'collection', ARGV[5])
return 1
