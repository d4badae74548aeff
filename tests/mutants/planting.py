"""Rewrites Rust sources so that mutants of cargo-mutants are selected at run time.

A mutant N becomes a branch on `crate::fox_mutant(N)`: a replaced function body an early return, an operator an `if`
with both expressions, a deleted match arm a guard. Nested mutants are written into both branches. The comments
`/*N<*/` and `/*>N*/` around each one attribute compiler errors to mutants.
"""

import re

import tree_sitter
import tree_sitter_rust

PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))
# Nothing here can be decided at run time.
CONSTANT = {"const_item", "static_item", "const_block", "enum_variant", "array_type", "const_parameter",
            "attribute_item"}

SWITCH = """
#[doc(hidden)]
#[allow(missing_docs, clippy::all)]
pub fn fox_mutant(number: usize) -> bool {
    use std::io::Write;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};
    static CHOSEN: OnceLock<(usize, Option<std::fs::File>)> = OnceLock::new();
    static SEEN: [AtomicBool; 8192] = [const { AtomicBool::new(false) }; 8192];
    let (chosen, trace) = CHOSEN.get_or_init(|| {
        let open = |path| std::fs::File::options().append(true).open(path).ok();
        let chosen = std::env::var("FOX_MUTANT").ok().and_then(|text| text.parse().ok());
        (chosen.unwrap_or(0), std::env::var_os("FOX_MUTANT_TRACE").and_then(open))
    });
    if let Some(mut trace) = trace.as_ref() {
        if !SEEN[number].load(Ordering::Relaxed) && !SEEN[number].swap(true, Ordering::Relaxed) {
            let _ = trace.write_all(format!("{number}\\n").as_bytes());
        }
    }
    *chosen == number
}
"""


class Edit:
    """A change of the bytes `start..end`: `write(inner)` returns the new text; `inner(a, b)` is the text of a range
    with the changes in it."""

    def __init__(self, number, start, end, write):
        self.number, self.start, self.end, self.write = number, start, end, write


class Unsupported(Exception):
    pass


def marked(number, text):
    return f"/*{number}<*/{text}/*>{number}*/"


def offset(lines, place):
    """Byte offset of a line and a column in characters, both from 1."""
    before = sum(len(line.encode()) for line in lines[: place["line"] - 1])
    return before + len(lines[place["line"] - 1][: place["column"] - 1].encode())


def ancestors(node):
    while node is not None:
        yield node
        node = node.parent


def edit_of(mutant, root, lines):
    """The edit of one mutant."""
    number, new = mutant["number"], mutant["replacement"]
    start, end = offset(lines, mutant["span"]["start"]), offset(lines, mutant["span"]["end"])
    node = root.descendant_for_byte_range(start, max(start, end - 1))
    for above in ancestors(node):
        constant_function = above.type == "function_item" and any(
            child.type == "function_modifiers" and b"const" in child.text for child in above.children)
        if above.type in CONSTANT or constant_function:
            raise Unsupported("in a constant")
    switch = f"crate::fox_mutant({number})"

    def choice(area, other):
        """Evaluates `other` instead of the expression where the mutant is selected."""
        a, b = area.start_byte, area.end_byte
        return Edit(number, a, b, lambda inner: marked(
            number, f"(if {switch} {{ {other(inner)} }} else {{ {inner(a, b)} }})"))

    def text(part):
        return lambda inner: inner(part.start_byte, part.end_byte)

    if mutant["genre"] == "FnValue":
        function = next(above for above in ancestors(node) if above.type == "function_item")
        returned = function.child_by_field_name("return_type")
        if returned is not None and b"impl " in returned.text:
            raise Unsupported("the return type is opaque")
        return Edit(number, start, start, lambda inner: marked(number, f"if {switch} {{ return {new}; }} "))
    if mutant["genre"] == "BinaryOperator":
        area = node.parent
        if area.type not in ("binary_expression", "compound_assignment_expr"):
            raise Unsupported(f"operator of a {area.type}")
        left, right = text(area.child_by_field_name("left")), text(area.child_by_field_name("right"))
        if area.type == "binary_expression":
            return choice(area, lambda inner: f"({left(inner)}) {new} ({right(inner)})")
        return choice(area, lambda inner: f"{left(inner)} {new} ({right(inner)})")
    if mutant["genre"] == "UnaryOperator":
        area = node.parent
        if area.type != "unary_expression":
            raise Unsupported(f"operator of a {area.type}")
        return choice(area, text(area.children[-1]))
    if mutant["genre"] == "MatchArmGuard":
        if (node.start_byte, node.end_byte) != (start, end):
            raise Unsupported("guard with a pattern")
        return choice(node, lambda inner: new)
    if mutant["genre"] == "MatchArm":
        arm = next(above for above in ancestors(node) if above.type == "match_arm")
        pattern = arm.child_by_field_name("pattern")
        guard = pattern.child_by_field_name("condition")
        if guard is None:
            at = pattern.end_byte
            return Edit(number, at, at, lambda inner: marked(number, f" if !{switch}"))
        a, b = guard.start_byte, guard.end_byte
        return Edit(number, a, b, lambda inner: marked(number, f"!{switch} && ({inner(a, b)})"))
    if mutant["genre"] == "StructField":
        field = next(a for a in ancestors(node) if a.type in ("field_initializer", "shorthand_field_initializer"))
        base = next(f for f in field.parent.children if f.type == "base_field_initializer").children[-1]
        if field.type == "field_initializer":
            name = field.child_by_field_name("field").text.decode()
            return choice(field.child_by_field_name("value"), lambda inner: f"({text(base)(inner)}).{name}")
        name, a, b = field.text.decode(), field.start_byte, field.end_byte
        return Edit(number, a, b, lambda inner: marked(
            number, f"{name}: if {switch} {{ ({base.text.decode()}).{name} }} else {{ {name} }}"))
    raise Unsupported(mutant["genre"])


def render(source, edits, start, end):
    """Text of a range with the edits in it; of edits of the same range the first encloses the others."""
    edits = sorted((e for e in edits if start <= e.start and e.end <= end), key=lambda e: (e.start, -e.end, e.number))
    # An insertion at the start of a range stands before it.
    inserts = [e for e in edits if e.start == e.end]
    rest = [e for e in edits if e.start != e.end]
    text, at = "", start
    for edit in sorted(inserts + outermost(rest), key=lambda e: (e.start, e.end, e.number)):
        if edit.start < at:
            continue
        within = [e for e in edits if e is not edit and edit.start != edit.end
                  and edit.start <= e.start and e.end <= edit.end and not (e.start == e.end == edit.start)
                  and not (e.start == e.end == edit.end)]
        text += source[at:edit.start].decode() + edit.write(lambda a, b: render(source, within, a, b))
        at = edit.end
    return text + source[at:end].decode()


def outermost(edits):
    kept = []
    for edit in edits:
        if not any(outer.start <= edit.start and edit.end <= outer.end for outer in kept):
            kept.append(edit)
    return kept


def plant(tree, path, mutants):
    """Plants the mutants of one file. Returns whether some cannot be planted, and sets their status."""
    file = tree / path
    source = file.read_bytes()
    root, lines = PARSER.parse(source).root_node, source.decode().splitlines(keepends=True)
    edits, dropped = [], False
    for mutant in mutants:
        try:
            edits.append(edit_of(mutant, root, lines))
        except Unsupported as reason:
            mutant["status"], dropped = f"dropped: {reason}", True
    file.write_text(render(source, edits, 0, len(source)))
    return dropped


def add_switch(file):
    file.write_text(file.read_text() + SWITCH)


def blame(tree, error):
    """Numbers of the mutants around the places of a compiler error, the innermost ones first choice."""
    found = set()
    for span in sorted(error["spans"], key=lambda span: not span["is_primary"]):
        if found and not span["is_primary"]:
            break
        text = (tree / span["file_name"]).read_bytes()
        around = []
        for match in re.finditer(rb"/\*(\d+)<\*/", text):
            close = text.find(b"/*>" + match.group(1) + b"*/", match.end())
            if match.start() <= span["byte_end"] and span["byte_start"] <= close:
                around.append((close - match.start(), int(match.group(1))))
        if around:
            found.add(min(around)[1])
    return found
