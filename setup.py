"""Lists the packages: pyproject.toml cannot find those that lie outside the package's folder."""

from pathlib import Path

from setuptools import find_packages, setup

CONF = [
    ".".join(("lightning_diffpipe", *folder.parts))
    for folder in sorted({path.parent for path in Path("conf").rglob("*.yaml")})
]
WEIGHTS = ["lightning_diffpipe.weights.glyphs", "lightning_diffpipe.weights.glyphs_transformer"]

setup(
    packages=[
        *find_packages(include=["lightning_diffpipe", "lightning_diffpipe.*"]),
        *CONF,
        *WEIGHTS,
    ],
    package_data={
        **{package: ["*.yaml"] for package in CONF},
        "lightning_diffpipe.modules": ["published/*.json"],
        **{package: ["*.md", "*.json", "*/*.json", "*/*.safetensors"] for package in WEIGHTS},
    },
)
