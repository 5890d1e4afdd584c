"""Tests of displaced patch parallelism."""
