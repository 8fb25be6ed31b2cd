-- Holds chunks for one file of one collection, and stores those that are new.
--
-- KEYS[1]    the set of chunk ids that this file holds
-- KEYS[2..]  one chunk hash each
-- ARGV       six for each chunk: id, title, text, vector, tokens, tokenizer; an empty vector: hold it if it is there
-- returns    the ids that are not there and came without a vector
-- cost       O(chunks)
local missing = {}
for i = 2, #KEYS do
  local at = (i - 2) * 6
  local id, vector = ARGV[at + 1], ARGV[at + 4]
  if redis.call('EXISTS', KEYS[i]) == 0 and vector == '' then
    missing[#missing + 1] = id
  else
    if redis.call('EXISTS', KEYS[i]) == 0 then
      redis.call('HSET', KEYS[i], 'title', ARGV[at + 2], 'text', ARGV[at + 3], 'vector', vector,
        'tokens', ARGV[at + 5], 'tokenizer', ARGV[at + 6])
    end
    if redis.call('SADD', KEYS[1], id) == 1 then
      redis.call('HINCRBY', KEYS[i], 'holders', 1)
    end
  end
end
return missing
