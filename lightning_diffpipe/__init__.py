"""Pipelines for diffusion models."""
