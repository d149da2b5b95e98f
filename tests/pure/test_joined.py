"""The page's files as one module: all that they have, and nothing that is not understood."""

import hashlib
import json
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab._panel import joined as joining
from memlab._panel.joined import PAGE, JoiningError, joined
from tests.page_parts import node

FILES = sorted(str(path.relative_to(PAGE)) for path in PAGE.rglob("*.js"))
VENDORED = "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Put files in the place of the page's, and return how they are written."""
    monkeypatch.setattr(joining, "PAGE", tmp_path)
    joined.cache_clear()

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    yield write
    joined.cache_clear()


def run(text, tmp_path):
    """Return what a module prints as JSON."""
    path = tmp_path / "run.mjs"
    path.write_text(text)
    done = subprocess.run([node(), path], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", FILES)
def test_every_file_of_the_page_can_be_joined_and_loads(file, tmp_path):
    module = tmp_path / "joined.mjs"
    module.write_text(joined(file))
    code = "console.log(JSON.stringify(Object.keys(m)))"
    exported = run(f'const m = await import("{module.as_uri()}"); {code}', tmp_path)
    own = run(f'const m = await import("{(PAGE / file).as_uri()}"); {code}', tmp_path)
    assert exported == own


def test_what_others_wrote_is_as_they_published_it():
    text = (PAGE / "vendor" / "preact.js").read_bytes()
    assert hashlib.sha256(text).hexdigest() == VENDORED
    assert joined("vendor/preact.js").encode() == text


def test_a_file_that_two_import_is_there_once_and_comments_are_kept(page):
    page(
        {
            "a.js": 'import { b } from "./b.js";\nimport { c as d } from "./in/c.js";\n'
            "export default b + d; // the sum\n",
            "b.js": 'import { c } from "./in/c.js";\n/** Twice. */\nexport const b = 2 * c;\n',
            "in/c.js": "const one = 1;\nexport { one as c };\n",
        }
    )
    text = joined("a.js")
    assert text.count("const one = 1;") == 1
    assert "/** Twice. */" in text
    assert "export default b + d; // the sum" in text


WRONG = {
    'import a from "./b.js";': "line 2",
    'import "./b.js";': "line 2",
    'import { b } from "preact";': "line 2",
    'import { nothing } from "./b.js";': "b.js does not export nothing",
    'import { b } from "./none.js";': "there is no none.js",
    'import { b } from "../b.js";': r"there is no \.\./b.js",
    'const b = await import("./b.js");': "line 2",
    "const here = import.meta.url;": "line 2",
    "export let a = 1;": "line 2",
    "export const { a } = {};": "line 2",
    'export * from "./b.js";': "line 2",
    'export { b } from "./b.js";': "line 2",
    'import { a } from "./a.js";': "a.js imports a.js, in a cycle",
    'import { c } from "./c.js";': "a.js imports c.js imports d.js imports c.js",
    'import { e } from "./e.js";': "e.js, line 1",  # a default that no other file can name
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_not_understood_is_an_error_that_says_where(page, line):
    page(
        {
            "a.js": f"// begins\n{line}\n",
            "b.js": "export const b = 1;\n",
            "c.js": 'import { d } from "./d.js";\nexport const c = d;\n',
            "d.js": 'import { c } from "./c.js";\nexport const d = c;\n',
            "e.js": "export default 1;\n",
        }
    )
    with pytest.raises(JoiningError, match=WRONG[line]):
        joined("a.js")


@st.composite
def projects(draw):
    """Draw files, each of which may import names of those before it, and prints in the last."""
    files = {}
    for number in range(draw(st.integers(1, 5))):
        folder = draw(st.sampled_from(["", "in/"]))
        lines, terms = [], [str(draw(st.integers(0, 9)))]
        for other in draw(st.lists(st.sampled_from(sorted(files)), unique=True)) if files else []:
            local = draw(st.sampled_from(["", f" as own{len(lines)}"]))
            up = "../" if folder else "./"
            exported = f"value{files[other][0]}"
            lines.append(f'import {{ {exported}{local} }} from "{up}{other}";')
            terms.append(local.removeprefix(" as ") or exported)
        total = " + ".join(terms)
        lines += draw(
            st.sampled_from(
                [
                    [f"export const value{number} = {total};"],
                    [f"const hidden = 3 * ({total});", f"export {{ hidden as value{number} }};"],
                    [
                        f"const hidden = [{total}];",
                        f"export function made{number}() {{", "  return hidden[0];", "}",
                        f"export const value{number} = made{number}();",
                    ],
                ]
            )
        )  # fmt: skip
        files[f"{folder}f{number}.js"] = (number, "\n".join(lines) + "\n")
    last, (number, text) = files.popitem()
    printing = f"export default value{number};\n"
    if "as value" in text:
        printing = "export default hidden;\n"
    return last, {name: text for name, (_, text) in files.items()} | {last: text + printing}


@given(projects())
@settings(max_examples=15, deadline=None)
def test_one_module_computes_what_its_files_compute(tmp_path_factory, project):
    entry, files = project
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "PAGE", folder)
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        (folder / "package.json").write_text('{"type": "module"}')
        joined.cache_clear()
        (folder / "joined.mjs").write_text(joined(entry))
        joined.cache_clear()
    loaded = ", ".join(f'(await import("./{name}")).default' for name in (entry, "joined.mjs"))
    (folder / "package.json").write_text('{"type": "module"}')
    apart, together = run(f"console.log(JSON.stringify([{loaded}]))", folder)
    assert apart == together
