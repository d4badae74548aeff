//! Chat templates of any text: a prompt or an error, within limits on memory, stack and time.
#![no_main]

use fox_data::{ChatMessage, ChatTemplate};
use fox_fuzz::check_sentence;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let template = ChatTemplate {
        source: Some(text.to_owned()),
        bos_token: "<s>".into(),
        eos_token: "</s>".into(),
    };
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
        ..ChatMessage::default()
    };
    let call = serde_json::json!({"id": "1", "function": {"name": "f", "arguments": {"x": [1]}}});
    let messages = [
        message("system", "Be brief."),
        message("user", "a b\nc"),
        ChatMessage { tool_calls: vec![call], ..message("assistant", "") },
        ChatMessage { tool_call_id: Some("1".into()), ..message("tool", "2") },
    ];
    match template.check().and_then(|()| template.render(&messages, true)) {
        Ok(prompt) => assert!(prompt.len() <= 8 << 20, "{} bytes", prompt.len()),
        Err(error) => check_sentence(&error),
    }
});
