import pytest
import yaml
from environments import REPOSITORY, PackageLinks, engine_python

FAMILY = REPOSITORY / "tests" / "data" / "family"


@pytest.fixture(scope="session")
def lmcache_python():
    return engine_python("lmcache")


@pytest.fixture(scope="session")
def lmcache_path(tmp_path_factory):
    """A folder for PYTHONPATH: this clone, as if it were installed."""
    return PackageLinks(tmp_path_factory.mktemp("lmcache") / "path").folder


@pytest.fixture(scope="session")
def family_manifest(family_mapper, tmp_path_factory):
    """``family_manifest(...)``: a manifest of the trained family over a store of its own."""

    def make(**model):
        folder = tmp_path_factory.mktemp("manifest")
        names = ("small", "large")
        pair = {"source": "small", "target": "large", "mapper": str(family_mapper.folder)}
        # A sampled prompt is not converted, which these tests are about.
        pair["policy"] = {"sampled_share": 0.0}
        manifest = {
            "family": "tests",
            "store": f"local://{folder}/store?min_free=0",
            "models": {name: {"path": str(FAMILY / name), **model} for name in names},
            "pairs": [pair],
        }
        (folder / "family.yaml").write_text(yaml.safe_dump(manifest))
        return folder / "family.yaml"

    return make
