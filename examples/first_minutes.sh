#!/usr/bin/env bash
# The quick start with four kinds of models that this script makes itself, in the current folder:
# scikit-learn as ONNX, PyTorch as .pt2, a Hugging Face text classifier, and a Python function. Each is
# inspected, served, called with curl and measured; the first is optimised with a budget of one minute.
# Ends at the first failure. Needs curl, scikit-learn, skl2onnx and "penstock[torch,hf]"; five minutes.
set -euo pipefail

PORT=${PORT:-8000}
URL=http://127.0.0.1:$PORT
SERVER=""

step() { printf '\n== %s\n' "$*"; }
show() { printf '$ %s\n' "$*"; "$@"; }
stop() { if [ -n "$SERVER" ]; then kill "$SERVER" && wait "$SERVER" && SERVER=""; fi; }
trap stop EXIT

# serve MODEL NAME: start the server, and wait until the model is ready.
serve() {
    printf '$ penstock serve %s &\n' "$1"
    penstock serve "$1" --http-port "$PORT" --no-grpc --no-metrics &
    SERVER=$!
    for _ in $(seq 600); do
        if curl -sf "$URL/v2/models/$2/ready" > /dev/null; then return; fi
        kill -0 "$SERVER" || { echo "the server has ended"; exit 1; }
        sleep 0.2
    done
    echo "$2 is not ready after two minutes"
    exit 1
}

# call NAME JSON WORD: the answer must contain the word.
call() {
    printf '$ curl %s/v2/models/%s/infer -d %s\n' "$URL" "$1" "'$2'"
    curl -sf "$URL/v2/models/$1/infer" -d "$2" | tee answer.json
    echo
    grep -q "$3" answer.json || { echo "expected $3 in the answer"; exit 1; }
}

# measure NAME: a short load test.
measure() {
    show penstock bench "$URL/v2/models/$1" --concurrency 4 --duration 2s --json "$1.json"
}

step "Make the models: iris.onnx, squares.pt2, reviews/ and shout.py"
python - <<'PYTHON'
import warnings

import numpy as np

warnings.simplefilter("ignore")

# A scikit-learn classifier as skl2onnx writes it: its scores are a list of dictionaries (ZipMap).
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier

flowers = load_iris()
rows = flowers.data.astype(np.float32)
forest = RandomForestClassifier(50, random_state=0).fit(rows, flowers.target)
with open("iris.onnx", "wb") as file:
    file.write(to_onnx(forest, rows[:1]).SerializeToString())
np.savez("iris.npz", X=np.tile(rows, (4, 1)))

# A PyTorch module with a batch of any size.
import torch


class Squares(torch.nn.Module):
    def forward(self, x):
        return {"squares": x * x}


batch = torch.export.Dim("batch", max=64)
exported = torch.export.export(
    Squares(), (torch.ones(2, 3),), dynamic_shapes={"x": {0: batch}}
)
torch.export.save(exported, "squares.pt2")

# A text classifier with its tokenizer, as `save_pretrained` writes them. Its weights are random.
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

texts = ["a wonderful film", "a terrible film", "I would see it again", "I fell asleep"]
tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
tokenizer.train_from_iterator(
    texts, trainers.WordPieceTrainer(special_tokens=special, show_progress=False)
)
ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=ends
)
transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
    sep_token="[SEP]", model_max_length=64,
).save_pretrained("reviews")
torch.manual_seed(0)
transformers.BertForSequenceClassification(
    transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=64,
        id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
).save_pretrained("reviews")
PYTHON
cat > shout.py <<'PYTHON'
def shout(text: str) -> str:
    return text.upper() + "!"
PYTHON
ls -d iris.onnx squares.pt2 reviews shout.py

step "scikit-learn: iris.onnx"
show penstock inspect iris.onnx
serve iris.onnx iris
call iris '{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}]}' outputs
measure iris
stop

step "PyTorch: squares.pt2"
serve squares.pt2 squares
call squares '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}' '9'
measure squares
stop

step "Hugging Face: text in, label out"
serve reviews reviews
call reviews '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a wonderful film"]}]}' 'TIVE'
measure reviews
stop

step "A Python function: shout.py"
serve shout.py shout
call shout '{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["it works"]}]}' 'IT WORKS'
measure shout
stop

step "Optimise iris.onnx within one minute, and serve the result"
show penstock optimize iris.onnx --data iris.npz --slo "p99 < 50 ms at 100/s" \
    --accuracy "agreement drop <= 2 %" --out models --budget 60s --html optimize.html
serve models iris
call iris '{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}]}' outputs
stop

step "Done: optimize.html shows what each step gained"
