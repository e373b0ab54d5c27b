"""Recipes: functions that return a full configuration."""
