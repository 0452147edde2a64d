"""Runs, studies and what they say: training from a recipe, evaluation, statistics, reports and plots."""
