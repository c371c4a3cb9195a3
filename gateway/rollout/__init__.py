"""Rollouts: a candidate takes over a model's traffic step by step, or is rolled back.

``plan`` is what a person asked for, ``counts`` what was observed, ``decision`` the pure function
from both to what happens next. ``traffic_split`` wraps the inference service while a rollout runs;
``controller`` moves a rollout through its stages and keeps its state.
"""
