"""The fixtures of the encoders are what their script makes. That the encoders give the same, tests/encode.rs shows."""
from conftest import FIXTURES
from make_encode_fixtures import main


def test_fixtures_are_what_the_script_makes(tmp_path):
    main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in (FIXTURES / "encode").iterdir()}
