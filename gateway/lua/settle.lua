-- Puts what a request really used in the place of what `reserve.lua` set aside, and ends it. Runs once a request: a
-- second call changes no count. What was released completely used 0, and so did a request in every window that is not
-- named here. A request that is not known has its end noted: a reservation that comes later (the network held it back,
-- and who asked has given up on it) is refused.
--
-- KEYS   1  hash    the tenant's windows, and what its requests hold: see `reserve.lua`
--        2  zset    the tenant's requests
-- ARGV   1  request id
--        then three for each window: name, length in ms, used
--
-- A window that has ended meanwhile is left alone: the next one owes nothing to it.
--
-- Returns for each window of ARGV as it is now: used, ms until it ends; 0, 0 when none is open
-- Cost    O(windows + log running)

local DAY = 86400000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local field = 'held:' .. ARGV[1]
local held = redis.call('HGET', KEYS[1], field)
local used_of, reply = {}, {}
for i = 2, #ARGV, 3 do
  used_of[ARGV[i]] = tonumber(ARGV[i + 2])
end

if not held then
  redis.call('HSET', KEYS[1], field, 'ended')
  redis.call('ZADD', KEYS[2], -now, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], 2 * DAY)
  redis.call('PEXPIRE', KEYS[2], 2 * DAY)
elseif held ~= 'ended' then
  for name, start, amount in string.gmatch(held, '(%S+) (%d+) (%d+)') do
    local window = redis.call('HMGET', KEYS[1], name .. ':start', name .. ':used')
    if window[1] == start then
      local used = math.max(0, tonumber(window[2]) - tonumber(amount) + (used_of[name] or 0))
      redis.call('HSET', KEYS[1], name .. ':used', used)
    end
  end
  redis.call('HDEL', KEYS[1], field)
  redis.call('ZREM', KEYS[2], ARGV[1])
end

for i = 2, #ARGV, 3 do
  local window = redis.call('HMGET', KEYS[1], ARGV[i] .. ':start', ARGV[i] .. ':used')
  local left = tonumber(window[1] or 0) + tonumber(ARGV[i + 1]) - now
  reply[#reply + 1] = left > 0 and tonumber(window[2]) or 0
  reply[#reply + 1] = math.max(0, left)
end
return reply
