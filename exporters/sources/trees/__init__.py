"""Models of scikit-learn, XGBoost, LightGBM and CatBoost, from files that hold no pickles.

scikit-learn's are read from ``skops`` files, XGBoost's from its JSON or UBJSON, LightGBM's from its
text, CatBoost's from its JSON. Each takes one matrix, ``features``, or every column of strings and
numbers by its name; a classifier gives ``probabilities`` or else ``scores``, a regressor
``prediction``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from modelport.exporters.loaded_model import Origin, Source
from modelport.exporters.model_spec import Decision, ModelSpec
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.trees.columns import table
from modelport.exporters.sources.trees.fitted_model import (
    FEATURES,
    PROBABILITIES,
    SCORES,
    FittedModel,
)
from modelport.gateway.errors import UsageError
from modelport.gateway.repository.artifact_checks import trial_load
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.types import Array, Datatype, ModelSignature, TensorSpec

SKOPS = ".skops"
#: Of a model's random inputs, those that lie at a split or beside it, and those that are missing.
AT_A_SPLIT, MISSING = 0.5, 0.05


def load(request: SourceRequest) -> Source:
    """Load a model's file; it declares its own signature.

    Raises:
        UsageError: the file has another suffix, or options that need a module are given.
        IntegrityError: the file is damaged, or wants to run code.
        Unsupported: the library is not installed, or the model has no prediction to export.
    """
    path = request.checkpoint
    if request.model is not None or request.model_kwargs:
        raise UsageError(f"'{path}' holds its own model; omit --model and --model-kwargs")
    if _needs_trial(path):  # native code reads it, and may end the process
        trial_load.run(f"{__name__}:read", path)
    fitted = read(path)
    signature = ModelSignature(
        fitted.inputs,
        (TensorSpec(fitted.output, Datatype.FP32, (fitted.outputs,)),),
        request.max_batch_size,
    )

    def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
        rows = table(fitted.columns, inputs) if fitted.columns else inputs[FEATURES]
        return {fitted.output: fitted.predict(rows).astype(np.float32)}

    return Source(
        framework=fitted.framework,
        model=fitted,
        spec=ModelSpec(
            path.stem,
            lambda model, max_batch_size: signature,
            sample=_sampler(fitted),
            recorded=int(bool(fitted.columns)),  # what has columns draws its own edges
            decision=_decision(fitted),
        ),
        signature=signature,
        reference=reference,
        parameter_count=fitted.size,
        origins=(Origin(path.name, sha256_of(path)),),
        labels=tuple(fitted.classes or ()) if fitted.outputs > 1 else (),
        notices=_notices(fitted),
    )


def _needs_trial(path: Path) -> bool:
    if path.suffix.lower() != SKOPS:
        return True
    from modelport.exporters.sources.trees import skops_file

    return skops_file.holds_booster(path)


def read(path: Path) -> FittedModel:
    """Read the model in ``path`` and run it once; errors as in ``load``."""
    suffix = path.suffix.lower()
    if suffix == SKOPS:
        from modelport.exporters.sources.trees import scikit_learn

        return scikit_learn.read(path)
    if suffix == ".json":
        from modelport.exporters.sources.trees import catboost_model

        if catboost_model.is_catboost(path):
            return catboost_model.read(path)
    if suffix in (".ubj", ".json"):
        from modelport.exporters.sources.trees import xgboost_model

        return xgboost_model.read(path)
    from modelport.exporters.sources.trees import lightgbm_model

    return lightgbm_model.read(path)


def _decision(fitted: FittedModel) -> Decision | None:
    """The largest column; of two classes, a score above 0 is the second."""
    if fitted.output not in (PROBABILITIES, SCORES):
        return None
    return Decision(fitted.output, threshold=0.0 if fitted.outputs == 1 else None)


def _notices(fitted: FittedModel) -> tuple[str, ...]:
    """The notice about categories that scikit-learn refuses and ONNX cannot."""
    known = ", ".join(c.name for c in fitted.columns if c.values and not (c.text or c.unknown))
    if not known:
        return ()
    return (
        f"categories of {known} that were not in the training are answered, although scikit-learn "
        'refuses them; train with handle_unknown="ignore" to define the answer',
    )


def _sampler(
    fitted: FittedModel,
) -> Callable[[ModelSignature, int, Mapping[str, int], np.random.Generator], dict[str, Array]]:
    """Draw features as in training, many of them at a split or one step of float32 beside it.

    There converters go wrong: libraries compare in float64, and ONNX in float32.
    """

    def sample(
        signature: ModelSignature,
        batch: int,
        sizes: Mapping[str, int],
        rng: np.random.Generator,
    ) -> dict[str, Array]:
        if fitted.columns:
            return {column.name: column.draw(batch or 1, rng) for column in fitted.columns}
        shape = (batch or 1, fitted.features)
        drawn = (fitted.centre + fitted.spread * rng.standard_normal(shape)).astype(np.float32)
        for feature, splits in fitted.splits.items() if fitted.direct else ():
            at = rng.choice(splits, len(drawn)).astype(np.float32)
            towards = rng.choice(np.array([-np.inf, np.nan, np.inf], np.float32), len(drawn))
            beside = np.where(np.isnan(towards), at, np.nextafter(at, towards))
            chosen = rng.random(len(drawn)) < AT_A_SPLIT
            drawn[chosen, feature] = beside[chosen]
        if fitted.minimum is not None:
            drawn = np.maximum(np.abs(drawn), np.float32(fitted.minimum))
        if fitted.missing:
            drawn[rng.random(shape) < MISSING] = np.nan
        return {FEATURES: drawn}

    return sample
