-- Claims the ingestion that waits longest: jobs are scored with the time from which on anybody may have them.
--
-- KEYS[1] jobs   KEYS[2] attempts
-- ARGV[1] now, seconds   ARGV[2] until when the claim holds
-- returns {job, which attempt this is}, or {} when there is nothing to do
-- cost    O(log jobs)
local jobs = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1)
if #jobs == 0 then return {} end
redis.call('ZADD', KEYS[1], ARGV[2], jobs[1])
return {jobs[1], redis.call('HINCRBY', KEYS[2], jobs[1], 1)}
