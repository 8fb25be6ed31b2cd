-- Takes a file out of a collection, and lets go of its chunks; chunks that nobody holds any more are deleted.
--
-- KEYS[1] members   KEYS[2] version   KEYS[3] events   KEYS[4] chunks that the file holds   KEYS[5] the file's collections
-- KEYS[6] jobs
-- ARGV[1] file id   ARGV[2] tenant   ARGV[3] collection id   ARGV[4] prefix of chunk keys   ARGV[5] the job
-- ARGV[6] 'orphan': only let go of chunks, and only if the file is no member (any more)
-- returns {1 when it was a member, ids of the chunks that are gone}
-- cost    O(chunks of the file)
if ARGV[6] == 'orphan' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return {0, {}} end
local gone = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local key = ARGV[4] .. id
  if redis.call('HINCRBY', key, 'holders', -1) <= 0 then
    redis.call('DEL', key)
    gone[#gone + 1] = id
  end
end
redis.call('DEL', KEYS[4])
redis.call('SREM', KEYS[5], ARGV[3])
redis.call('ZREM', KEYS[6], ARGV[5])
local was = redis.call('HDEL', KEYS[1], ARGV[1])
if was == 1 then
  redis.call('INCR', KEYS[2])
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 10000, '*', 'tenant', ARGV[2], 'collection', ARGV[3])
end
return {was, gone}
