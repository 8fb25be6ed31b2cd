-- Changes records, all or none, and appends the change to the audit log: there is no change without its line.
--
-- KEYS   1       stream  the audit log
--        2, ...  hash    one for each record
-- ARGV   1       the line, JSON
--        then three for each record: field, the text it must have now ("" for: must not exist), the new text
--        ("" for: delete)
--
-- Returns the line's id, or nothing when a record was not as expected
-- Cost    O(records)

for i = 2, #KEYS do
  local at = 3 * i - 4
  local found = redis.call('HGET', KEYS[i], ARGV[at])
  if (found or '') ~= ARGV[at + 1] then
    return false
  end
end
for i = 2, #KEYS do
  local at = 3 * i - 4
  if ARGV[at + 2] == '' then
    redis.call('HDEL', KEYS[i], ARGV[at])
  else
    redis.call('HSET', KEYS[i], ARGV[at], ARGV[at + 2])
  end
end
return redis.call('XADD', KEYS[1], '*', 'line', ARGV[1])
