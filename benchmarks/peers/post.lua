-- wrk: POST one body, count what is not 200, print the summary as one line of JSON.
-- Arguments: the file of the body, then "name: value" for each header.
local threads = {}
other = 0

function setup(thread)
  table.insert(threads, thread)
end

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
  for i = 2, #arguments do
    local name, value = arguments[i]:match("^([^:]+): (.*)$")
    wrk.headers[name] = value
  end
end

function response(status)
  if status ~= 200 then other = other + 1 end
end

function done(summary, latency)
  local bad = 0
  for _, thread in ipairs(threads) do bad = bad + thread:get("other") end
  local e = summary.errors
  print(string.format(
    'JSON {"requests": %d, "seconds": %f, "failed": %d, "p50_us": %f, "p99_us": %f}',
    summary.requests, summary.duration / 1e6,
    bad + e.connect + e.read + e.write + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
