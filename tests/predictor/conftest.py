import pytest

from tests.predictor.tiny_pipelines import build


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Folders of tiny pipelines by name, each written once."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name) / "saved"
            build(name, folders[name].parent / "words").save_pretrained(folders[name])
        return folders[name]

    return folder
