#!/bin/sh
# The server with nothing but curl: curl.sh [http://host:port]
set -eu
url=${1:-http://localhost:8000}

ask() {
    curl --silent --show-error --fail-with-body "$@"
    echo
}

expect() {
    case $1 in
        *"$2"*) echo "$1" ;;
        *) echo "expected $2, got $1" >&2; exit 1 ;;
    esac
}

ask "$url/v2/health/ready"
expect "$(ask "$url/v2/models/simple")" '"OUTPUT0"'

# Sum and difference, as JSON.
ones='[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]'
expect "$(ask "$url/v2/models/simple/infer" --data '{
  "inputs": [
    {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": '$ones'},
    {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": '$ones'}
  ],
  "outputs": [{"name": "OUTPUT0"}]
}')" '[2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2]'

expect "$(ask "$url/v2/models/text_length/infer" --data '{
  "inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["penstock"]}]
}')" '"data":[8]'

# The bytes of a tensor and nothing else: a raw request.
printf penstock | ask "$url/v2/models/text_length/infer" --data-binary @- \
    --header 'Inference-Header-Content-Length: 0' --output /dev/null

expect "$(ask "$url/v2/models/text_length/stats")" '"text_length"'
