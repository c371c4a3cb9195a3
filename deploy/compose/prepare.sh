#!/bin/sh
# Makes the models that compose.yaml mounts: the fraud model for the gateway, TorchServe, TensorFlow Serving and
# Triton, each in its own format and all verified against one checkpoint.
#
#   deploy/compose/prepare.sh checkpoints/fraud.pt [MODELS]      # MODELS: deploy/compose/models
set -eu
checkpoint=${1:?usage: prepare.sh CHECKPOINT [MODELS]}
models=${2:-$(dirname "$0")/models}
if [ -e "$models" ]; then
    echo "prepare.sh: $models already exists; remove it, or give another directory" >&2
    exit 2
fi
repository=$(mktemp -d)
trap 'rm -rf "$repository"' EXIT
modelport export "$checkpoint" --model fraud --repository "$repository" \
    --format onnx --format torchscript --format savedmodel
mkdir -p "$models/onnx" "$models/torchserve"
cp -R "$repository/fraud-onnx" "$models/onnx/"
modelport package "$repository/fraud-torchscript" --for torchserve \
    --output "$models/torchserve/fraud-torchscript.mar"
modelport package "$repository/fraud-savedmodel" --for tfserving \
    --output "$models/tfserving" --base-path /models
modelport package "$repository/fraud-onnx" --for triton --output "$models/triton"
chmod -R a+rX "$models"
