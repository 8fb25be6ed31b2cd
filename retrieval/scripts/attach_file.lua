-- Makes a file a member of a collection and queues its ingestion.
--
-- KEYS[1] members   KEYS[2] jobs   KEYS[3] the file's collections   KEYS[4] the file   KEYS[5] the collection
-- KEYS[6] attempts
-- ARGV[1] file id   ARGV[2] record   ARGV[3] the job   ARGV[4] collection id   ARGV[5] now
-- returns 1, or 0 when the file or the collection is not there (any more)
-- cost    O(log jobs)
if redis.call('EXISTS', KEYS[4]) == 0 or redis.call('EXISTS', KEYS[5]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SADD', KEYS[3], ARGV[4])
redis.call('HDEL', KEYS[6], ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[3])
return 1
