"""Rollouts: a candidate takes over a model's traffic step by step, or is rolled back.

``plan`` is what a person asked for. ``traffic`` wraps the inference service while a rollout runs
and counts what it observes; ``statistics`` decides from plan and counts what happens next;
``controller`` moves a rollout through its stages and keeps its ``shared_state``.
"""
