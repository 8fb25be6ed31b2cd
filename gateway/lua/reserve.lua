-- Reserves a request's part of every limit of its tenant, or of none. Run again for a request that holds something, it
-- puts another amount in the place of that.
--
-- KEYS   1  hash    the tenant's windows: "<name>:start" (ms since 1970), "<name>:used"; and what each request holds:
--                   "held:<id>" = "<name> <start> <amount>" for each window, or "ended"
--        2  zset    the tenant's requests: running ones scored by the end of their lease (ms), others by minus the time
--                   at which that was noticed
-- ARGV   1  request id
--        2  lease in ms
--        3  how many requests may run at once; "" for no limit
--        then four for each window: name, length in ms, limit, amount
--
-- A window begins with the first request in it. An amount above the limit is cut to it, so that a request larger than
-- its window has the whole of one to itself and does not wait for ever: the limit is passed by one request at most.
-- What a request holds is kept here and not with who asked: an answer can be lost, and what was reserved must still be
-- found by whoever settles it; a gateway can die, and then it is given back here when the lease is over.
--
-- Returns, admitted:  {1, then for each window: used, ms until it ends}
--          refused:   {0, "concurrent" or the window's name, ms to wait}
--          too late:  {0, "ended", 0}, for a request that was settled before this came
-- Cost   O(windows + log running), and as much for each lease that is over

local DAY = 86400000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function held_by(id)
  local parts = {}
  for name, start, amount in string.gmatch(redis.call('HGET', KEYS[1], 'held:' .. id) or '', '(%S+) (%d+) (%d+)') do
    parts[name] = {tonumber(start), tonumber(amount)}
  end
  return parts
end

local function hold(id, parts)
  local text = {}
  for name, part in pairs(parts) do
    text[#text + 1] = string.format('%s %.0f %.0f', name, part[1], part[2])
  end
  redis.call('HSET', KEYS[1], 'held:' .. id, table.concat(text, ' '))
end

local function window_of(name)
  local window = redis.call('HMGET', KEYS[1], name .. ':start', name .. ':used')
  return tonumber(window[1] or 0), tonumber(window[2] or 0)
end

if redis.call('HGET', KEYS[1], 'held:' .. ARGV[1]) == 'ended' then
  return {0, 'ended', 0}
end

-- Leases that are over: their gateways died. If one was only away for long, its settlement puts in what was used.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], 0, now, 'LIMIT', 0, 100)) do
  local parts = held_by(id)
  for name, part in pairs(parts) do
    local start, used = window_of(name)
    if start == part[1] then
      redis.call('HSET', KEYS[1], name .. ':used', math.max(0, used - part[2]))
    end
    part[2] = 0
  end
  hold(id, parts)
  redis.call('ZADD', KEYS[2], -now, id)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], DAY - now, 0, 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('HDEL', KEYS[1], 'held:' .. id)
end

if ARGV[3] ~= '' and redis.call('ZCOUNT', KEYS[2], now, '+inf') >= tonumber(ARGV[3]) then
  return {0, 'concurrent', 1000}
end

local held, reply, writes = held_by(ARGV[1]), {1}, {}
local refused, wait = nil, -1
for i = 4, #ARGV, 4 do
  local name, length, limit = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local amount = math.min(tonumber(ARGV[i + 3]), limit)
  local start, used = window_of(name)
  if now >= start + length or now < start then -- the clock may have been set back
    start, used = now, 0
  end
  -- Its own part is no obstacle to a request; what it holds in a window that has ended is gone with it.
  if held[name] and held[name][1] == start then
    used = math.max(0, used - held[name][2])
  end
  -- The window that opens last decides how long to wait.
  if used + amount > limit and start + length - now > wait then
    refused, wait = name, start + length - now
  end
  held[name] = {start, amount}
  reply[#reply + 1] = used + amount
  reply[#reply + 1] = start + length - now
  for _, value in ipairs({name .. ':start', start, name .. ':used', used + amount}) do
    writes[#writes + 1] = value
  end
end
if refused then
  return {0, refused, wait}
end

if #writes > 0 then
  redis.call('HSET', KEYS[1], unpack(writes))
end
hold(ARGV[1], held)
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], 2 * DAY)
redis.call('PEXPIRE', KEYS[2], 2 * DAY)
return reply
