//! Jinja by `minijinja`, with every operation that creates or compares values metered.
//!
//! `minijinja` limits steps, not sizes. A compiled template is therefore rewritten: around instructions that can create
//! large values (`+`, `~`, `*`, lists, slices, calls, filters) calls of metering functions are inserted, whose names
//! contain a space so that no template can call or replace them. Filters that multiply text are wrapped.

use std::collections::BTreeMap;

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, Vm, WhitespaceConfig, make_string_output,
    parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, State, Value, context, escape_formatter, filters,
};
use minijinja_contrib::pycompat;

use super::limits::{
    MAX_ELIFS, MAX_RECURSION, MAX_SOURCE_BYTES, MAX_STEPS, MAX_TAG_TOKENS, Meter, TemplateLimit,
    check_stored,
};
use super::{ChatError, ChatMessage};

/// The variables of a chat template.
pub(super) struct Context<'a> {
    pub(super) messages: &'a [ChatMessage],
    pub(super) tools: &'a [serde_json::Value],
    pub(super) add_generation_prompt: bool,
    pub(super) bos_token: &'a str,
    pub(super) eos_token: &'a str,
}

/// As Hugging Face's libraries set up Jinja.
const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

const NAME: &str = "chat";

// Metering functions and the constant 1.
const CREATED: &str = "meter created";
const BEFORE_CONCAT: &str = "meter concat";
const BEFORE_MUL: &str = "meter mul";
const BEFORE_COMPARE: &str = "meter compare";
const BEFORE_STORE: &str = "meter store";
const ONE: &str = "__one";

/// Compiles a template and passes it to `work`.
pub(super) fn with_compiled<T>(
    source: &str,
    work: impl FnOnce(&Compiled<'_>) -> Result<T, ChatError>,
) -> Result<T, ChatError> {
    let source = without_constant_products(source)?;
    let (root, blocks) = instructions(&source)?;
    let blocks = blocks.iter().map(|(name, block)| (*name, rewrite(block))).collect();
    work(&Compiled { root: rewrite(&root), blocks, source_bytes: source.len() })
}

/// A compiled template.
pub(super) struct Compiled<'s> {
    root: Instructions<'s>,
    blocks: BTreeMap<&'s str, Instructions<'s>>,
    source_bytes: usize,
}

impl Compiled<'_> {
    /// Renders the template.
    pub(super) fn render(&self, values: &Context<'_>) -> Result<String, ChatError> {
        let value_bytes = |value: &serde_json::Value| value.to_string().len() + 64;
        let message_bytes = |m: &ChatMessage| {
            let calls: usize = m.tool_calls.iter().map(value_bytes).sum();
            m.role.len() + m.content.len() + calls + 64
        };
        let tools: usize = values.tools.iter().map(value_bytes).sum();
        let input = tools + values.messages.iter().map(message_bytes).sum::<usize>();
        // Templates ask whether there are tools.
        let listed = match values.tools {
            [] => Value::from(()),
            list => Value::from_serialize(list),
        };
        let environment = environment(&Meter::new(input + self.source_bytes));
        let context = context! {
            messages => Value::from_serialize(values.messages),
            tools => listed,
            add_generation_prompt => values.add_generation_prompt,
            bos_token => values.bos_token,
            eos_token => values.eos_token,
        };
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        Vm::new(&environment)
            .eval(&self.root, context, &self.blocks, &mut output, AutoEscape::None)
            .map(drop)
            .map_err(|error| chat_error(&error))?;
        Ok(text)
    }
}

type RootAndBlocks<'s> = (Instructions<'s>, BTreeMap<&'s str, Instructions<'s>>);

fn instructions(source: &str) -> Result<RootAndBlocks<'_>, ChatError> {
    let syntax = |error: Error| ChatError::Syntax { detail: format!("{error:#}") };
    let tree = parse(source, NAME, SyntaxConfig, WHITESPACE).map_err(syntax)?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&tree);
    Ok(generator.finish())
}

/// Checks the limits on the source, and puts a variable into every product. The compiler would otherwise compute products
/// of constants, such as `'a' * 99999999`, without a limit.
fn without_constant_products(source: &str) -> Result<String, ChatError> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(ChatError::Limit(TemplateLimit::Source));
    }
    let (mut rewritten, mut copied) = (String::with_capacity(source.len()), 0);
    let (mut tokens, mut elifs) = (0, 0);
    let mut after_operand = false;
    for token in tokenize(source, false, SyntaxConfig, WHITESPACE) {
        let (token, span) =
            token.map_err(|error| ChatError::Syntax { detail: format!("{error:#}") })?;
        tokens += 1;
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => tokens = 0,
            Token::Ident("elif") => elifs += 1,
            // Not the `*` of `f(*arguments)`.
            Token::Mul if after_operand => {
                let end = span.end_offset as usize;
                rewritten.push_str(&source[copied..end]);
                rewritten.push_str(ONE);
                rewritten.push('*');
                copied = end;
            }
            _ => {}
        }
        if tokens > MAX_TAG_TOKENS || elifs > MAX_ELIFS {
            return Err(ChatError::Limit(TemplateLimit::Expression));
        }
        after_operand = !matches!(token, Token::ParenOpen | Token::Comma);
    }
    rewritten.push_str(&source[copied..]);
    Ok(rewritten)
}

/// Inserts calls of the metering functions.
fn rewrite<'s>(old: &Instructions<'s>) -> Instructions<'s> {
    use Instruction as I;
    // The metering function before and after an instruction.
    let meters = |instruction: &Instruction<'_>| match instruction {
        I::StringConcat => (Some(BEFORE_CONCAT), None),
        I::Add => (Some(BEFORE_CONCAT), Some(CREATED)),
        I::Mul => (Some(BEFORE_MUL), Some(CREATED)),
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte | I::In | I::CompareAndPreserve(_) => {
            (Some(BEFORE_COMPARE), None)
        }
        I::SetAttr(_) => (Some(BEFORE_STORE), None),
        I::Slice
        | I::BuildList(_)
        | I::BuildMap(_)
        | I::ApplyFilter(..)
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(_) => (None, Some(CREATED)),
        _ => (None, None),
    };
    let all = || (0..old.len() as u32).filter_map(|at| old.get(at).map(|i| (at, i)));
    // Where each instruction begins in the new list, for jumps.
    let mut starts = Vec::with_capacity(old.len() + 1);
    let mut next = 0;
    for (_, instruction) in all() {
        starts.push(next);
        let (before, after) = meters(instruction);
        let raw = matches!(instruction, I::EmitRaw(_));
        next += 1 + 2 * u32::from(before.is_some()) + u32::from(after.is_some() || raw);
    }
    starts.push(next);
    let target = |at: u32| starts.get(at as usize).copied().unwrap_or(next);
    let mut new = Instructions::new(old.name(), old.source());
    for (at, instruction) in all() {
        let line = old.get_line(at).unwrap_or(0) as u16;
        let mut add = |instruction: Instruction<'s>| new.add_with_line(instruction, line);
        let (before, after) = meters(instruction);
        if let Some(name) = before {
            // The function returns its operands as a list.
            add(I::CallFunction(name, Some(2)));
            add(I::UnpackList(2));
        }
        match instruction {
            I::EmitRaw(text) => {
                add(I::LoadConst(Value::from_safe_string((*text).to_owned())));
                add(I::Emit);
            }
            I::Iterate(to) => drop(add(I::Iterate(target(*to)))),
            I::Jump(to) => drop(add(I::Jump(target(*to)))),
            I::JumpIfFalse(to) => drop(add(I::JumpIfFalse(target(*to)))),
            I::JumpIfFalseOrPop(to) => drop(add(I::JumpIfFalseOrPop(target(*to)))),
            I::JumpIfTrueOrPop(to) => drop(add(I::JumpIfTrueOrPop(target(*to)))),
            I::BuildMacro(name, to, flags) => drop(add(I::BuildMacro(name, target(*to), *flags))),
            other => drop(add(other.clone())),
        }
        if let Some(name) = after {
            add(I::CallFunction(name, Some(1)));
        }
    }
    new
}

fn environment(meter: &Meter) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.add_function("raise_exception", |detail: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, detail.clone()).with_source(Refusal(detail)))
    });
    environment.add_global(ONE, 1);
    let of = |run: fn(&Meter, &[Value]) -> Result<Value, Error>| {
        let meter = meter.clone();
        move |values: Rest<Value>| run(&meter, &values)
    };
    environment.add_function(CREATED, of(|meter, values| meter.created(first(values))));
    environment.add_function(
        BEFORE_CONCAT,
        of(|meter, values| {
            let sizes =
                values.iter().map(|value| meter.size(value)).collect::<Result<Vec<_>, _>>()?;
            meter.create(sizes.iter().map(|size| size.bytes).sum())?;
            Ok(operands(values))
        }),
    );
    environment.add_function(
        BEFORE_MUL,
        of(|meter, values| {
            for (value, count) in values.iter().zip(values.iter().rev()) {
                if let (false, Some(count)) = (value.is_number(), count.as_usize()) {
                    let size = meter.size(value)?;
                    let each = if value.as_str().is_some() { size.bytes } else { size.total() };
                    meter.create(each.saturating_mul(count as u64))?;
                }
            }
            Ok(operands(values))
        }),
    );
    environment.add_function(
        BEFORE_COMPARE,
        of(|meter, values| {
            if let [a, b] = values {
                meter.compare(a, b)?;
            }
            Ok(operands(values))
        }),
    );
    environment.add_function(
        BEFORE_STORE,
        of(|_, values| {
            check_stored(&first(values), 0)?;
            Ok(operands(values))
        }),
    );
    let written = meter.clone();
    environment.set_formatter(move |output, state, value| {
        written.write(written.size(value)?.bytes)?;
        escape_formatter(output, state, value)
    });
    add_filters(&mut environment, meter);
    environment
}

fn first(values: &[Value]) -> Value {
    values.first().cloned().unwrap_or_default()
}

/// The list that `UnpackList` turns into the same operands again: it puts the last element down first.
fn operands(values: &[Value]) -> Value {
    values.iter().rev().cloned().collect()
}

/// A check of a filter's operands; the first is the value that is filtered.
type Guard = fn(&Meter, &[Value]) -> Result<(), Error>;

/// Filters whose result can be much larger than their operands.
const GUARDED: [(&str, &str, Guard); 5] = [
    ("replace", "plain replace", before_replace),
    ("join", "plain join", before_join),
    ("indent", "plain indent", before_indent),
    ("format", "plain format", before_format),
    ("tojson", "plain tojson", before_json),
];

/// Wraps filters, tests and methods that create or search much, and removes filters that are lazy or take lengths and
/// that no chat template uses.
fn add_filters(environment: &mut Environment<'static>, meter: &Meter) {
    for name in ["batch", "slice", "chain", "zip", "pprint"] {
        environment.remove_filter(name);
    }
    environment.add_filter("plain replace", filters::replace);
    environment.add_filter("plain join", filters::join);
    environment.add_filter("plain indent", filters::indent);
    environment.add_filter("plain format", filters::format);
    environment.add_filter("plain tojson", filters::tojson);
    for (name, plain, guard) in GUARDED {
        let m = meter.clone();
        environment.add_filter(name, move |state: &State<'_, '_>, values: Rest<Value>| {
            guard(&m, &values)?;
            state.apply_filter(plain, &values)
        });
    }
    let m = meter.clone();
    environment.add_test("in", move |state: &State<'_, '_>, value: &Value, container: &Value| {
        m.compare(value, container)?;
        minijinja::tests::is_in(state, value, container)
    });
    let m = meter.clone();
    environment.set_unknown_method_callback(move |state, value, method, arguments| {
        let operands = || [std::slice::from_ref(value), arguments].concat();
        match (method, arguments) {
            ("replace", _) => before_replace(&m, &operands())?,
            ("join", [values, ..]) => before_join(&m, &[values.clone(), value.clone()])?,
            ("format", _) => before_format(&m, &operands())?,
            _ => m.charge(m.size(value)?.bytes)?,
        }
        pycompat::unknown_method_callback(state, value, method, arguments)
    });
}

fn before_replace(meter: &Meter, values: &[Value]) -> Result<(), Error> {
    let [value, from, to, ..] = values else { return Ok(()) };
    let (text, from) = (value.to_string(), from.to_string());
    let count = if from.is_empty() { text.len() + 1 } else { text.matches(&from).count() };
    let added = (count as u64).saturating_mul(meter.size(to)?.bytes);
    meter.create(added.saturating_add(text.len() as u64))
}

fn before_join(meter: &Meter, values: &[Value]) -> Result<(), Error> {
    let list = first(values);
    let joiner = values.get(1).map_or(Ok(0), |joiner| meter.size(joiner).map(|size| size.bytes))?;
    let joiners = (list.len().unwrap_or(0) as u64).saturating_mul(joiner);
    meter.create(joiners.saturating_add(meter.size(&list)?.bytes))
}

fn before_indent(meter: &Meter, values: &[Value]) -> Result<(), Error> {
    let text = first(values).to_string();
    let lines = text.lines().count() as u64 + 1;
    let width = values.iter().skip(1).map(largest_integer).max().unwrap_or(0).max(4);
    meter.create((text.len() as u64).saturating_add(lines.saturating_mul(width)))
}

fn before_json(meter: &Meter, values: &[Value]) -> Result<(), Error> {
    if values.iter().skip(1).any(|value| largest_integer(value) > 16) {
        return Err(TemplateLimit::Size.into());
    }
    meter.create(meter.size(&first(values))?.total())
}

/// The largest integer of an argument, or of keyword arguments.
fn largest_integer(value: &Value) -> u64 {
    let keywords =
        value.try_iter().into_iter().flatten().filter_map(|key| value.get_item(&key).ok());
    let values = keywords.chain([value.clone()]);
    values.filter_map(|value| u64::try_from(value).ok()).max().unwrap_or(0)
}

/// Refuses widths of more than three digits, widths from arguments, and results that may be too large.
fn before_format(meter: &Meter, values: &[Value]) -> Result<(), Error> {
    let text = first(values).to_string();
    let digits = text.as_bytes().windows(4).any(|bytes| bytes.iter().all(u8::is_ascii_digit));
    if digits || text.contains('*') {
        return Err(TemplateLimit::Size.into());
    }
    let mut largest = 0;
    for value in values.iter().skip(1) {
        largest = largest.max(meter.size(value)?.bytes);
    }
    let fields = text.matches(['%', '{']).count() as u64;
    meter.create((text.len() as u64).saturating_add(fields.saturating_mul(largest + 1_000)))
}

/// The words of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn chat_error(error: &Error) -> ChatError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(limit) = cause.downcast_ref::<TemplateLimit>() {
            return ChatError::Limit(*limit);
        }
        if let Some(Refusal(detail)) = cause.downcast_ref::<Refusal>() {
            return ChatError::Refused { detail: detail.clone() };
        }
        source = cause.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::Limit(TemplateLimit::Steps),
        _ if error.detail().is_some_and(|detail| detail.contains("recursion")) => {
            ChatError::Limit(TemplateLimit::Depth)
        }
        _ => ChatError::Failed { detail: format!("{error:#}") },
    }
}
