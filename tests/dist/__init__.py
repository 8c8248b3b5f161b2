"""Tests that need several ranks, and the harness that gives them real processes."""
