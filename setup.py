"""Lists the packages: pyproject.toml cannot find those of `conf/`, which lies outside the package."""

from pathlib import Path

from setuptools import find_packages, setup

CONF_PACKAGES = [
    ".".join(("lightning_diffpipe", *folder.parts))
    for folder in sorted({path.parent for path in Path("conf").rglob("*.yaml")})
]

setup(
    packages=[*find_packages(include=["lightning_diffpipe", "lightning_diffpipe.*"]), *CONF_PACKAGES],
    package_data={package: ["*.yaml"] for package in CONF_PACKAGES},
)
