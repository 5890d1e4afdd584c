"""Tests of following values through a transformer, and of what is found so."""
