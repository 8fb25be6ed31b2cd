-- Write a batch of records and the names they use, all or nothing.
--
-- KEYS[1]  meta    hash
-- KEYS[2]  names   hash: digest → packed name
-- KEYS[3…] groups  strings of fixed-size records, one slot of the slab after the other
-- ARGV[1]  incarnation of the sender
-- ARGV[2]  seconds until what is written expires, unless it is used
-- ARGV[3]  number n of names
-- ARGV[4 … 3 + 2n]  digest and packed name in turn; an empty one is deleted
-- ARGV[…]  then index in KEYS, offset in bytes and bytes in turn
--
-- Returns "ok"; "gone" when the index is not there any more (flushed, evicted, or failed over to an empty replica);
-- "stale" when a newer incarnation has it. Then nothing was written.
-- Cost: O(bytes written).

local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if not incarnation then
  return 'gone'
end
if incarnation ~= ARGV[1] then
  return 'stale'
end
local at = 4
for _ = 1, tonumber(ARGV[3]) do
  if ARGV[at + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[at])
  else
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  end
  at = at + 2
end
while at <= #ARGV do
  redis.call('SETRANGE', KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2])
  at = at + 3
end
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, ARGV[2])
end
return 'ok'
