-- Reserves a request's part of every limit of its tenant, or of none. Run again for a request that holds something, it
-- puts another amount in its place.
--
-- KEYS   1  hash    the tenant's windows: "<name>:start" (ms since 1970), "<name>:used"
--        2  zset    the tenant's running requests, scored by the end of their lease (ms)
-- ARGV   1  request id
--        2  lease in ms
--        3  how many requests may run at once; "" for no limit
--        then six for each window: name, length in ms, limit, amount, and what the request holds in it already:
--        start of the window, amount (0, 0 for a new request)
--
-- A window begins with the first request in it. An amount above the limit is cut to it, so that a request larger than
-- its window has the whole of one to itself and does not wait for ever: the limit is passed by one request at most.
--
-- Returns, admitted:  {1, running, then for each window: reserved, start, used, ms until it ends}
--          refused:   {0, "concurrent" or the window's name, ms to wait}
-- Cost   O(windows + log running)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local running = redis.call('ZCOUNT', KEYS[2], now, '+inf')
if ARGV[3] ~= '' and running >= tonumber(ARGV[3]) then
  return {0, 'concurrent', 1000}
end

local reply, writes, longest = {1, running + 1}, {}, 0
local refused, wait = nil, -1
for i = 4, #ARGV, 6 do
  local name, length, limit = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local amount = math.min(tonumber(ARGV[i + 3]), limit)
  local window = redis.call('HMGET', KEYS[1], name .. ':start', name .. ':used')
  local start, used = tonumber(window[1] or 0), tonumber(window[2] or 0)
  if now >= start + length then
    start, used = now, 0
  end
  -- Its own part is no obstacle to a request; what it holds in a window that has ended is gone with it.
  if start == tonumber(ARGV[i + 4]) then
    used = math.max(0, used - tonumber(ARGV[i + 5]))
  end
  -- The window that opens last decides how long to wait.
  if used + amount > limit and start + length - now > wait then
    refused, wait = name, start + length - now
  end
  for _, value in ipairs({amount, start, used + amount, start + length - now}) do
    reply[#reply + 1] = value
  end
  for _, value in ipairs({name .. ':start', start, name .. ':used', used + amount}) do
    writes[#writes + 1] = value
  end
  longest = math.max(longest, length)
end
if refused then
  return {0, refused, wait}
end

if #writes > 0 then
  redis.call('HSET', KEYS[1], unpack(writes))
  redis.call('PEXPIRE', KEYS[1], 2 * longest)
end
-- Those whose gateway died: their leases count no more; a day later they are forgotten.
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 86400000)
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[2], 2 * 86400000)
return reply
