//! Chat templates: those of published models, and hostile ones.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant};

use fox_data::{ChatError, ChatMessage, ChatTemplate, TemplateLimit};

fn conversation() -> Vec<ChatMessage> {
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
        ..ChatMessage::default()
    };
    vec![message("system", "Be brief."), message("user", " Hi! ")]
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate { source: Some(source.into()), bos_token: "<s>".into(), eos_token: "</s>".into() }
}

fn render(source: &str) -> Result<String, ChatError> {
    let template = template(source);
    template.check()?;
    template.render(&conversation(), true)
}

#[test]
fn without_a_template_messages_are_paragraphs() {
    let template = ChatTemplate::default();
    assert_eq!(
        template.render(&conversation(), true).unwrap(),
        "Be brief.\nUser:  Hi! \nAssistant:"
    );
    assert!(!template.writes_bos());
    assert_eq!(template.stop_strings(), ["\nUser:"]);
}

/// The constructs of published templates, with the methods of Python that they use.
#[test]
fn renders_what_published_templates_use() {
    for (source, text) in [
        (
            "{{ bos_token }}{% if messages[0]['role'] == 'system' %}\n{% set rest = messages[1:] %}\n\
             [{{ messages[0].content.strip() }}]\n{% endif %}\n{% for m in rest %}\n\
             <|{{ m['role'] | upper }}|>{{ m['content'].strip() }}{{ eos_token }}\n{% endfor %}\n\
             {% if add_generation_prompt %}<|ASSISTANT|>{% endif %}",
            "<s>[Be brief.]\n<|USER|>Hi!</s>\n<|ASSISTANT|>",
        ),
        (
            "{%- set ns = namespace(text='', n=0) -%}{%- for m in messages -%}\
             {%- set ns.text = ns.text + m.role + ':' + (m.content | trim) ~ ';' -%}\
             {%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.text }}{{ ns.n * 2 }}{{ '-' * 3 }}",
            "system:Be brief.;user:Hi!;4---",
        ),
        (
            "{%- macro show(m, end='.') -%}{{ m.role }}={{ m.content | trim }}{{ end }}{%- endmacro -%}\
             {%- for m in messages -%}{{ show(m) if loop.first else show(m, end='!') }}{%- endfor -%}",
            "system=Be brief..user=Hi!!",
        ),
        (
            "{%- for m in messages -%}{%- if loop.index0 > 0 -%}{%- break -%}{%- endif -%}{{ m.role }}{%- endfor -%}\
             {{ messages | length }}{{ 'user' in messages[1].role and 1 < 2 < 3 }}{{ undefined_name is defined }}",
            "system2TrueFalse",
        ),
        (
            "{{ messages | map(attribute='role') | join(', ') }} {{ {'a': [1, 'x']} | tojson }} \
             {{ ['a', 'b'] + ['c'] }} {{ 'a,b'.split(',') | last }} {{ 'x%sy' | format(1) }} \
             {{ 'aXb'.replace('X', '--') }} {{ ('a\nb') | indent(2) }}",
            "system, user {\"a\":[1,\"x\"]} [\"a\", \"b\", \"c\"] b x1y a--b a\n  b",
        ),
        (
            "{% set block %}<{{ messages[0].role }}>{% endset %}{{ block }}{{ block[1:3] }}\
             {{ [1, 2, 3][::-1] }}{{ range(3) | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
            "<system>sy[3, 2, 1][0, 1, 2]1",
        ),
    ] {
        assert_eq!(render(source).unwrap(), text, "{source}");
    }
}

#[test]
fn reports_refusals_and_mistakes() {
    for (source, sentence) in [
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refuses these messages: roles must alternate",
        ),
        ("{% if", "the chat template has a syntax error: "),
        ("{{ nothing.at.all }}", "the chat template failed: "),
    ] {
        let error = render(source).unwrap_err().to_string();
        assert!(error.starts_with(sentence), "{error}");
    }
}

/// Resident memory of the process now, in bytes.
#[cfg(target_os = "linux")]
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[cfg(not(target_os = "linux"))]
fn peak_memory() -> u64 {
    0
}

#[test]
fn hostile_templates_are_refused_within_bounds() {
    use TemplateLimit::{Cycle, Depth, Expression, Size, Source, Steps, Work};
    let brackets = |n: usize| format!("{{{{ {}1{} }}}}", "[".repeat(n), "]".repeat(n));
    let chain = |n: usize| format!("{{{{ 1{} }}}}", "+1".repeat(n));
    let elifs = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(5_000));
    let long_source = "x".repeat(1 << 20);
    let raw = format!(
        "{{% set x %}}{{% for a in range(9999) %}}{}{{% endfor %}}{{% endset %}}",
        "x".repeat(100_000)
    );
    #[rustfmt::skip]
    let attacks: [(&str, &[TemplateLimit]); 36] = [
        ("{{ '%10000000000d'|format(1) }}", &[Size]),
        ("{{ '%*d'|format(1000000000, 1) }}", &[Size]),
        ("{{ '{:>10000000000}'.format(1) }}", &[Size]),
        ("{% set ns = namespace(s='aaaa') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", &[Size]),
        ("{% set ns = namespace(s='aaaa') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", &[Size]),
        ("{% set ns = namespace(s='aaaa') %}{% for a in range(60) %}{% set ns.s = ns.s * 2 %}{% endfor %}", &[Size]),
        ("{% set ns = namespace(s=['a']) %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", &[Size]),
        ("{% set ns = namespace(s=['a']) %}{% for a in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s == ns.s }}",
         &[Size, Depth]),
        ("{% set ns = namespace(s=[]) %}{% for a in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
         &[Depth]),
        ("{% set ns = namespace(s={}) %}{% for a in range(99999) %}{% set ns.s = {'a': ns.s} %}{% endfor %}", &[Depth]),
        ("{% set ns = namespace(s='a') %}{% for a in range(40) %}{% set ns.s = ns.s|replace('a', 'aa') %}{% endfor %}",
         &[Size]),
        ("{% set ns = namespace(s='a') %}{% for a in range(40) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
         &[Size]),
        ("{% set ns = namespace(s='a') %}{% for a in range(40) %}{% set ns.s = ns.s|replace('', ns.s) %}{% endfor %}",
         &[Size]),
        ("{{ 'a\nb'|indent(10000000000) }}", &[Size]),
        ("{{ 'a\nb'|indent(width=10000000000) }}", &[Size]),
        ("{{ {'a': [1]}|tojson(indent=10000000000) }}", &[Size]),
        ("{{ 'a' * 99999999 }}", &[Size]),
        ("{{ 'a' * (100 * 1000 * 999) }}", &[Size]),
        ("{{ ['a' * 99999999, 99999999 * 'a'] }}", &[Size]),
        ("{{ ([0] * 1000000000000)|list }}", &[Size]),
        ("{{ range(99999)|join('a' * 10000) }}", &[Size]),
        ("{{ ('a' * 10000).join(range(99999)|list) }}", &[Size]),
        ("{{ range(99999)|map('replace', '', 'a' * 100000)|list }}", &[Size, Work]),
        ("{% set x = 'a' * 900000 %}{% for a in range(9999) %}{{ x|upper|length }}{% endfor %}", &[Size, Work]),
        ("{% set x = 'a' * 900000 %}{% set y = 'a' * 900000 %}{% for a in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
         &[Work]),
        ("{% set x = 'a' * 900000 %}{% for a in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}", &[Work]),
        ("{% set x = 'a' * 1000 %}{% for a in range(99999) %}{{ x }}{% endfor %}", &[Size]),
        ("{% set ns = namespace(s='aaaa') %}{% for a in range(60) %}{% set b %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = b %}{% endfor %}",
         &[Size]),
        (&raw, &[Size]),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", &[Cycle]),
        ("{% set ns = namespace() %}{% set ns.a = [{'b': ns}] %}", &[Cycle]),
        ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", &[Depth, Steps]),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% if 1 %}{% endif %}{% endfor %}{% endfor %}", &[Steps]),
        (&long_source, &[Source]),
        (&elifs, &[Expression]),
        (&chain(100_000), &[Expression]),
    ];
    for (source, limits) in attacks {
        let start = Instant::now();
        let error = render(source).unwrap_err();
        let shown: String = source.chars().take(120).collect();
        match &error {
            ChatError::Limit(limit) => assert!(limits.contains(limit), "{limit:?} by {shown}"),
            other => panic!("{other} by {shown}"),
        }
        assert!(!error.to_string().contains('\n'), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20), "{:?} by {shown}", start.elapsed());
    }
    // Brackets are bounded by the parser itself, which calls it a syntax error.
    for n in [100, 149, 400, 100_000] {
        assert!(render(&brackets(n)).is_err(), "{n}");
    }
    assert!(peak_memory() < 512 << 20, "{} MB", peak_memory() >> 20);
}

#[test]
fn long_conversations_are_rendered() {
    let long = "word ".repeat(2_000);
    let messages: Vec<ChatMessage> = (0..1_000)
        .map(|i| ChatMessage {
            role: if i % 2 == 0 { "user" } else { "assistant" }.into(),
            content: long.clone(),
            ..ChatMessage::default()
        })
        .collect();
    let source = "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<u>' + m['content'].strip() + '</u>' }}\
                  {% else %}{{ '<a>' + m['content'] | trim + '</a>' }}{% endif %}{% endfor %}";
    let text = template(source).render(&messages, true).unwrap();
    assert_eq!(text.len(), 1_000 * (long.len() - 1 + 7));
}
