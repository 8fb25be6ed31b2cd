-- Puts what a request really used in the place of what `reserve.lua` set aside, and ends it. Runs once a request:
-- a second call changes nothing. What was released completely used 0.
--
-- KEYS   1  hash    the tenant's windows
--        2  zset    the tenant's running requests
-- ARGV   1  request id
--        then five for each window: name, length in ms, start, reserved, used
--
-- A window that has ended meanwhile is left alone: the next one owes nothing to it.
--
-- Returns {whether this call was the one, then for each window: used, ms until it ends}
-- Cost    O(windows + log running)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local first = redis.call('ZREM', KEYS[2], ARGV[1])
local reply = {first}
for i = 2, #ARGV, 5 do
  local name, length, start = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local window = redis.call('HMGET', KEYS[1], name .. ':start', name .. ':used')
  local used, left = tonumber(window[2] or 0), tonumber(start) + length - now
  if window[1] == start and left > 0 then
    if first == 1 then
      used = math.max(0, used - tonumber(ARGV[i + 3]) + tonumber(ARGV[i + 4]))
      redis.call('HSET', KEYS[1], name .. ':used', used)
    end
  else
    used, left = 0, 0
  end
  reply[#reply + 1] = used
  reply[#reply + 1] = left
end
return reply
