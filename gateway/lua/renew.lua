-- Renews the leases of a tenant's running requests. One that has been settled meanwhile does not come back.
--
-- KEYS   1  zset    the tenant's running requests
-- ARGV   1  lease in ms
--        then request ids
--
-- Returns how many are still running
-- Cost    O(ids * log running)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local alive = 0
for i = 2, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[i])
    alive = alive + 1
  end
end
return alive
