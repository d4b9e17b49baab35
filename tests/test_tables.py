"""The generated tables are current. `make docs` rewrites them."""

import re

from pagedjax.models import MODEL_CLASSES
from pagedjax.tables import (
    FAMILIES,
    FIELD_TABLES,
    ROOT,
    flags_page,
    http_page,
    models_table,
    with_models_table,
)
from servers.app import ROUTES


def test_the_page_of_flags_is_current():
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == flags_page()


def test_the_page_of_the_http_interface_is_current():
    assert (ROOT / "docs" / "http.md").read_text(encoding="utf-8") == http_page()


def test_every_endpoint_with_a_table_of_fields_is_served():
    assert FIELD_TABLES.keys() <= {route.path for route in ROUTES}


def test_the_readme_lists_the_supported_models():
    assert models_table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_supported_architecture_has_its_families_named():
    assert set(FAMILIES) == set(MODEL_CLASSES)


def test_the_table_is_replaced_and_the_rest_kept():
    old = models_table().replace("Mistral", "Mistrel")
    assert with_models_table(f"before\n{old}\nafter") == f"before\n{models_table()}\nafter"


def test_a_flag_that_is_not_built_says_which_value_is_taken():
    page = flags_page()
    assert "| `--tensor-parallel-size` | `1` | Only `1`: anything else is not built yet; leave it at 1. |" in page
    assert "| `--enforce-eager` | XLA compiles every step before" in page


def test_every_file_that_the_readme_links_to_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(targets) >= 10
    assert not [target for target in targets if not (ROOT / target).exists()]
