"""Tests of transformers that run in parts."""
