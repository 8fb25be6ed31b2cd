-- Reserves a request's part of every limit of its tenant, or of none. Run again for a request that holds something, it
-- puts another amount in the place of that.
--
-- KEYS   1  hash    the tenant's windows: "<name>:start" (ms since 1970), "<name>:used"
--        2  zset    the tenant's running requests, scored by the end of their lease (ms)
--        3  hash    what each of them holds, by request id: "<name> <start> <amount>" for each window
-- ARGV   1  request id
--        2  lease in ms
--        3  how many requests may run at once; "" for no limit
--        then four for each window: name, length in ms, limit, amount
--
-- A window begins with the first request in it. An amount above the limit is cut to it, so that a request larger than
-- its window has the whole of one to itself and does not wait for ever: the limit is passed by one request at most.
-- What a request holds is kept here and not with who asked: an answer can be lost, and what was reserved must still be
-- found by whoever settles it.
--
-- Returns, admitted:  {1, then for each window: used, ms until it ends}
--          refused:   {0, "concurrent" or the window's name, ms to wait}
-- Cost   O(windows + log running)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[3] ~= '' and redis.call('ZCOUNT', KEYS[2], now, '+inf') >= tonumber(ARGV[3]) then
  return {0, 'concurrent', 1000}
end

local held = {}
for name, start, amount in string.gmatch(redis.call('HGET', KEYS[3], ARGV[1]) or '', '(%S+) (%d+) (%d+)') do
  held[name] = {tonumber(start), tonumber(amount)}
end

local reply, writes, longest = {1}, {}, 0
local refused, wait = nil, -1
for i = 4, #ARGV, 4 do
  local name, length, limit = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local amount = math.min(tonumber(ARGV[i + 3]), limit)
  local window = redis.call('HMGET', KEYS[1], name .. ':start', name .. ':used')
  local start, used = tonumber(window[1] or 0), tonumber(window[2] or 0)
  if now >= start + length then
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
  longest = math.max(longest, length)
end
if refused then
  return {0, refused, wait}
end

if #writes > 0 then
  local parts = {}
  for name, part in pairs(held) do
    parts[#parts + 1] = string.format('%s %.0f %.0f', name, part[1], part[2])
  end
  redis.call('HSET', KEYS[1], unpack(writes))
  redis.call('PEXPIRE', KEYS[1], 2 * longest)
  redis.call('HSET', KEYS[3], ARGV[1], table.concat(parts, ' '))
  redis.call('PEXPIRE', KEYS[3], 2 * 86400000)
end
-- Those whose gateway died: their leases count no more; a day later they are forgotten.
local forgotten = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - 86400000, 'LIMIT', 0, 100)
if #forgotten > 0 then
  redis.call('ZREM', KEYS[2], unpack(forgotten))
  redis.call('HDEL', KEYS[3], unpack(forgotten))
end
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[2], 2 * 86400000)
return reply
