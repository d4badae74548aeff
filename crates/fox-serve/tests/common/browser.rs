//! A real browser, driven over a pair of pipes with its own debugging protocol.
//!
//! Chromium reads commands from descriptor 3 and writes answers and events to descriptor 4, JSON ended by a zero
//! byte. A shell with named pipes does the plumbing, so nothing but the browser is needed.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A browser with one page.
pub struct Browser {
    process: Child,
    commands: File,
    answers: BufReader<File>,
    session: Value,
    next: u64,
    /// What the page complained about.
    pub complaints: Vec<String>,
    folder: PathBuf,
}

/// The browser on this machine, if there is one.
pub fn find() -> Option<PathBuf> {
    let named = std::env::var_os("FOX_CHROMIUM").map(PathBuf::from);
    let usual = ["chromium", "chromium-browser", "google-chrome"];
    let on_path = || {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path)
            .flat_map(|folder| usual.map(|name| folder.join(name)))
            .find(|file| file.is_file())
    };
    named.or_else(on_path)
}

impl Browser {
    pub fn start(program: &Path) -> Browser {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("fox-browser-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let (from, to) = (folder.join("commands"), folder.join("answers"));
        let made = Command::new("mkfifo").args([&from, &to]).status().unwrap();
        assert!(made.success());
        let script = r#"exec "$0" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
            --disable-background-networking --disable-component-update --disable-sync \
            --user-data-dir="$1/profile" --remote-debugging-pipe 3<"$1/commands" 4>"$1/answers""#;
        let process = Command::new("sh")
            .args([Path::new("-c"), Path::new(script), program, &folder])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Opening waits for the other side, in the order in which the shell opens.
        let commands = OpenOptions::new().write(true).open(&from).unwrap();
        let answers = BufReader::new(File::open(&to).unwrap());
        let mut browser = Browser {
            process,
            commands,
            answers,
            session: Value::Null,
            next: 0,
            complaints: Vec::new(),
            folder,
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = browser.call("Target.attachToTarget", attach)["sessionId"].clone();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    /// Sends a command and waits for its answer; events that come meanwhile are looked at.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            self.answers.read_until(0, &mut bytes).unwrap();
            bytes.pop();
            let answer: Value = serde_json::from_slice(&bytes).expect("the browser is gone");
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.listen(&answer);
        }
    }

    fn listen(&mut self, event: &Value) {
        let params = &event["params"];
        let complaint = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => {
                ["error", "warning", "assert"].iter().any(|kind| params["type"] == *kind)
            }
            Some("Log.entryAdded") => params["entry"]["level"] == "error",
            _ => false,
        };
        if complaint {
            self.complaints.push(params.to_string());
        }
    }

    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url }));
        self.wait_for("document.readyState === 'complete'");
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression holds; one that throws does not, e.g. because an element is not there yet.
    pub fn wait_for(&mut self, expression: &str) {
        let start = Instant::now();
        let safe =
            format!("(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()");
        while self.value(&safe) != true {
            let page = "document.body.innerText";
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{expression}\n{}",
                self.value(page)
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Clicks into the middle of an element with the mouse.
    pub fn click(&mut self, selector: &str) {
        self.click_at(selector, 0.5, 0.5);
    }

    /// Clicks into an element, at fractions of its width and height.
    pub fn click_at(&mut self, selector: &str, across: f64, down: f64) {
        self.mouse(&["mouseMoved", "mousePressed", "mouseReleased"], selector, across, down);
    }

    /// Moves the mouse over an element.
    pub fn hover(&mut self, selector: &str, across: f64, down: f64) {
        self.mouse(&["mouseMoved"], selector, across, down);
    }

    fn mouse(&mut self, kinds: &[&str], selector: &str, across: f64, down: f64) {
        let place = self.value(&format!(
            "(() => {{ const e = document.querySelector({selector:?}); e.scrollIntoView({{ block: 'center' }}); \
             const r = e.getBoundingClientRect(); \
             return [r.x + {across} * r.width, r.y + {down} * r.height]; }})()"
        ));
        for kind in kinds {
            let button = if *kind == "mouseMoved" { "none" } else { "left" };
            let params = json!({ "type": kind, "x": place[0], "y": place[1], "button": button,
                "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", params);
        }
    }

    /// Types into what has the focus.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// Presses a key; `modifiers` 2 is Control.
    pub fn key(&mut self, key: &str, code: u32, modifiers: u32) {
        for kind in ["rawKeyDown", "keyUp"] {
            let params = json!({ "type": kind, "key": key, "code": key, "modifiers": modifiers,
                "windowsVirtualKeyCode": code });
            self.call("Input.dispatchKeyEvent", params);
        }
    }

    pub fn resize(&mut self, width: u32, height: u32, scheme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", media);
    }

    /// A picture of the whole page, kept when `FOX_SCREENSHOTS` names a folder.
    pub fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("FOX_SCREENSHOTS") else { return };
        let params = json!({ "captureBeyondViewport": true });
        let picture = self.call("Page.captureScreenshot", params);
        let bytes = decode_base64(picture["data"].as_str().unwrap());
        std::fs::write(PathBuf::from(folder).join(name), bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
        drop(std::fs::remove_dir_all(&self.folder));
    }
}

fn decode_base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = group.iter().fold(0u32, |bits, c| bits << 6 | u32::from(value(*c)));
        let bits = bits << (6 * (4 - group.len()));
        bytes.extend(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}
