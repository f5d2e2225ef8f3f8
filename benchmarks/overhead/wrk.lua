-- Load generator script for wrk: sends the prepared requests in turn.
--   wrk ... -s wrk.lua URL -- WORKLOAD time|check
-- WORKLOAD is a file written by workload.py. In "time" mode response() is removed, so wrk
-- neither buffers nor parses bodies; it still counts statuses above 399 and socket errors.
-- In "check" mode every answer is compared. It is run with one thread per connection, so that the
-- answer at hand belongs to the request this thread sent last, also where the protocol has no id.
local ffi = require("ffi")
local threads = {}

function setup(thread)
  thread:set("number", #threads)
  table.insert(threads, thread)
end

-- First a line of Lua with the settings, then the requests, then the expected FP32 values.
local function load_workload(path)
  local file = assert(io.open(path, "rb"))
  local settings = assert(loadstring(file:read("*l")))()
  settings.requests, settings.expected = {}, {}
  for i, length in ipairs(settings.lengths) do settings.requests[i] = file:read(length) end
  for i = 1, #settings.lengths do settings.expected[i] = file:read(4 * settings.num_values) end
  file:close()
  return settings
end

function init(args)
  for i = 0, #args do
    if args[i] == "check" then check_mode = true end
    if args[i]:match("%.workload$") then work = load_workload(args[i]) end
  end
  last = (number * 61) % #work.requests
  checked, wrong, first_wrong = 0, 0, ""
  if not check_mode then response = nil end
end

function request()
  last = last % #work.requests + 1
  return work.requests[last]
end

local function answer(body)
  if work.binary then
    local raw = body:sub(-4 * work.num_values)
    return ffi.cast("const float *", raw), #raw / 4, raw  -- raw keeps the memory alive
  end
  local _, after = body:find(work.marker, 1, true)
  local list = after and body:match("%b[]", after) or ""
  local values = ffi.new("float[?]", #list + 1)  -- rounds what JSON spelled to FP32
  local count = 0
  for text in list:gmatch("[%d%.eE%+%-]+") do
    values[count] = tonumber(text) or 0 / 0
    count = count + 1
  end
  return values, count
end

local function complaint(status, body)
  local id = "r" .. (last - 1)
  if status ~= 200 then return "status " .. status end
  if work.has_ids and not body:match('"id"%s*:%s*"' .. id .. '"') then return "id is not " .. id end
  local values, count, raw = answer(body)
  if count ~= work.num_values then return count .. " values instead of " .. work.num_values end
  if work.tolerance == 0 and raw then
    return raw ~= work.expected[last] and id .. ": other bits than sent" or nil
  end
  local want = ffi.cast("const float *", work.expected[last])
  for i = 0, count - 1 do
    local off = math.abs(values[i] - want[i])
    if not (off <= work.tolerance * math.max(1, math.abs(want[i]))) then
      return id .. ": value " .. i .. " is " .. values[i] .. ", not " .. want[i]
    end
  end
end

function response(status, headers, body)
  checked = checked + 1
  local text = complaint(status, body)
  if text then
    wrong = wrong + 1
    if first_wrong == "" then first_wrong = text end
  end
end

function done(summary, latency, requests)
  local num_checked, num_wrong, sample = 0, 0, ""
  for _, thread in ipairs(threads) do
    num_checked = num_checked + thread:get("checked")
    num_wrong = num_wrong + thread:get("wrong")
    if sample == "" then sample = thread:get("first_wrong") end
  end
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"duration_us":%d,"p50_us":%d,"p90_us":%d,"p99_us":%d,"max_us":%d,'
    .. '"status_errors":%d,"socket_errors":%d,"checked":%d,"wrong":%d,"first_wrong":"%s"}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(90),
    latency:percentile(99), latency.max, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    num_checked, num_wrong, (sample:gsub('["\\%c]', "?"))))
end
