-- Adds counts to usage rows, once: a batch that comes again (because its answer was lost) changes nothing.
--
-- KEYS   1       string  the batch's mark
--        2, ...          in pairs: the hash of a tenant and hour, the set of tenants of that hour
-- ARGV   1       seconds until the rows are forgotten
--        then, for each pair: the tenant's id, the number n of counts, n times: field, count
--
-- Returns 1, or 0 for a batch that was here before
-- Cost    O(counts)

if not redis.call('SET', KEYS[1], '1', 'NX', 'EX', 3600) then
  return 0
end
local at = 2
for i = 2, #KEYS, 2 do
  local tenant, count = ARGV[at], tonumber(ARGV[at + 1])
  at = at + 2
  for _ = 1, count do
    redis.call('HINCRBY', KEYS[i], ARGV[at], ARGV[at + 1])
    at = at + 2
  end
  redis.call('SADD', KEYS[i + 1], tenant)
  redis.call('EXPIRE', KEYS[i], ARGV[1])
  redis.call('EXPIRE', KEYS[i + 1], ARGV[1])
end
return 1
