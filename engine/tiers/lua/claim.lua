-- An engine takes its slab's index over, in a new incarnation. What an earlier one still sends is refused from here on.
--
-- KEYS[1]  meta    hash
-- KEYS[2]  names   hash
-- KEYS[3…] groups  every group of records that this layout can have
-- ARGV[1]  incarnation
-- ARGV[2]  layout: format, record size, number of slots, as one string
-- ARGV[3]  seconds until everything here expires, unless it is used
-- ARGV[4]  "wipe" to start empty, else "keep"
-- ARGV[5…] other fields of meta, name and value in turn
--
-- Returns "kept" when records of the same layout may be there, "empty" otherwise.
-- Cost: O(number of groups).

local layout = redis.call('HGET', KEYS[1], 'layout')
local kept = ARGV[4] == 'keep' and layout == ARGV[2]
if not kept then
  redis.call('DEL', unpack(KEYS, 2))
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'layout', ARGV[2], unpack(ARGV, 5))
redis.call('EXPIRE', KEYS[1], ARGV[3])
return kept and 'kept' or 'empty'
