"""`outbox catalog render`: the page that analysts and consumers' developers read."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.catalog.page import markdown, page
from outbox_pipelines.cli.main import cli
from tests.catalog.conftest import CATALOG, Write


def test_the_page_has_everything_that_is_documented(write: Write) -> None:
    """Guards against entries and fields, those within others too, that are documented and not shown."""
    more = "version: 3\n    versions: {2: {}, 1: {}}\n    deliver_after: PT1H\n    topic: order-events"
    text = CATALOG.replace("topic: order-events", more)
    path = write(text + "    protobuf: {file: catalog.yaml, message: shop.Shipped}\n")
    path.with_name("catalog.yaml").touch()
    text = markdown(read_catalog(path))
    assert (
        "| [`order.placed`](#orderplaced) | A customer has placed an order. | shop | billing, shipping "
        "| team:orders | active |" in text
    )
    placed = text.partition("## `order.placed`")[2].partition("##")[0]
    assert "- topic: `order-events`" in placed
    assert "- version: 3; earlier ones: 1, 2" in placed
    assert "- delivered after: 1:00:00" in placed
    assert "| `total` | integer | yes | In cents. |" in placed
    assert "| `at` | string, date-time |  |  |" in placed
    assert "| `lines[].sku` | string | yes |  |" in placed
    shipped = text.partition("## `order.shipped`")[2]
    assert "- topic: by the aggregate type" in shipped
    assert "- consumers: none known" in shipped
    assert "- message of Protobuf: `shop.Shipped`" in shipped
    assert "The payload has no schema." in shipped


def test_the_html_page_stands_alone(write: Write) -> None:
    """Guards against links of the table that lead nowhere, and a page that needs the network."""
    text = page(read_catalog(write(CATALOG)))
    anchors = re.findall(r'href="#(.+?)"', text)
    assert anchors == ["orderplaced", "ordershipped"]
    assert all(f'<h2 id="{anchor}">' in text for anchor in anchors)
    assert "<td>In cents.</td>" in text
    assert not re.search(r"<script|<link|src=|https?:", text)


def test_topics_are_links_to_their_assets(write: Write) -> None:
    """Guards against a page from which no way leads to what is happening to its events."""
    url = "https://dagster.example.com/assets/topic"
    assert f"- topic: [`order-events`]({url}/order-events)" in markdown(
        read_catalog(write(CATALOG)), topics_url=url
    )
    environment = {"OUTBOX_CATALOG_FILE": str(write(CATALOG))}

    def run(address: str) -> tuple[int, str]:
        options = ["--format", "html", "--topics-url", address]
        done = CliRunner().invoke(cli, ["catalog", "render", *options], env=environment)
        return done.exit_code, done.output

    code, output = run(f"{url}/")
    assert (code, f'<a href="{url}/order-events"><code>order-events</code></a>' in output) == (0, True)
    for wrong in ("javascript:alert(1)", "dagster", "https://a) [x](y"):
        assert run(wrong) == (
            2,
            f"outbox: --topics-url is {wrong!r}: give an address such as https://HOST/assets/topic\n",
        )


def test_what_is_documented_cannot_break_the_page(write: Write) -> None:
    """Guards against a pipe or a bracket in a description that takes the table, or the page, apart."""
    odd = CATALOG.replace("In cents.", "a|b <script>alert(1)</script> *c*").replace("team:orders", "'a|b'")
    odd = odd.replace(
        "A customer has placed an order.", "<script>alert(2)</script> [so](javascript:alert(3))"
    )
    text = page(read_catalog(write(odd)))
    assert "<script" not in text
    assert 'href="javascript' not in text
    assert "<td>a|b &lt;script&gt;alert(1)&lt;/script&gt; *c*</td>" in text
    assert text.count("<td>a|b</td>") == 1


def test_the_markdown_page_has_no_html_of_a_description(write: Write) -> None:
    """Guards against a script in the page that a site renders without escaping."""
    hostile = "'A `b` <script>x</script> \\<img src=x> a < b [c](https://d)'"
    path = write(CATALOG.replace("A customer has placed an order.", hostile, 1))
    section = markdown(read_catalog(path)).partition("## `order.placed`")[2].partition("##")[0]
    assert "A `b` &lt;script>x&lt;/script> \\&lt;img src=x> a &lt; b [c](https://d)" in section
    assert "&amp;lt;" not in page(read_catalog(path))


def test_a_schema_that_contains_itself_has_an_end(write: Write) -> None:
    """Guards against a tree of categories that renders without end."""
    tree = """
      properties: {child: {$ref: "#"}}"""
    text = markdown(read_catalog(write(CATALOG.split("    schema:")[0] + f"    schema: {tree}\n")))
    assert "`child.child`" in text


def test_it_is_written_where_one_says(write: Write, tmp_path: Path) -> None:
    """Guards against a page that cannot be kept, and a failure to write that looks like success."""
    environment = {"OUTBOX_CATALOG_FILE": str(write(CATALOG))}
    output = tmp_path / "types.md"
    done = CliRunner().invoke(cli, ["catalog", "render", "--output", str(output)], env=environment)
    assert (done.exit_code, done.stdout) == (0, f"{output}: 2 event types\n")
    printed = CliRunner().invoke(cli, ["catalog", "render"], env=environment)
    assert output.read_text() == printed.stdout
    nowhere = str(tmp_path / "none" / "types.md")
    done = CliRunner().invoke(cli, ["catalog", "render", "--output", nowhere], env=environment)
    assert done.exit_code == 2
    assert "choose another file" in done.stderr
