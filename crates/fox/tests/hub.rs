//! Models by name: the Hugging Face cache, and downloads from a local server.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::small_model;

fn fox(home: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
    for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    command.args(arguments).env("HF_HOME", home).current_dir(home);
    command
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim_end().to_string()
}

const ASK: [&str; 5] = ["-p", "Ann sings.", "--max-tokens", "4", "--ignore-end"];

#[test]
fn finds_models_in_the_cache() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("hub/models--acme--tiny");
    let snapshot = folder.join("snapshots/abc123");
    fs::create_dir_all(folder.join("snapshots")).unwrap();
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::write(folder.join("refs/main"), "abc123").unwrap();
    small_model(&snapshot, |_| {});
    let generate =
        |name: &str| fox(home.path(), &[&["generate", name], &ASK[..]].concat()).output().unwrap();
    let output = generate("acme/tiny");
    assert!(output.status.success(), "{}", words(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout).split_whitespace().count(), 4);
    assert!(generate("acme/tiny@abc123").status.success());
    let missing = generate("acme/huge");
    assert!(!missing.status.success());
    assert_eq!(
        words(&missing),
        "error: acme/huge does not exist, and the Hugging Face cache has no model of that name; `fox generate \
         acme/huge --download` fetches it"
    );
    // Every other command that takes a checkpoint finds it by its name, too.
    for line in [
        "info acme/tiny",
        "convert acme/tiny converted --to official",
        "train tiny-fox-pro --init acme/tiny -o run --quiet --tokens 512 --device cpu --dry-run",
    ] {
        let words_of = line.split_whitespace().collect::<Vec<_>>();
        let output = fox(home.path(), &words_of).output().unwrap();
        assert!(output.status.success(), "{line}: {}", words(&output));
    }
    let output = fox(home.path(), &["retrofit", "acme/tiny", "gated"]).output().unwrap();
    assert!(words(&output).ends_with("the model has forget gates already"), "{}", words(&output));
    // A model that is there is not downloaded.
    assert!(generate("acme/tiny").status.success());
    let output = fox(home.path(), &[&["generate", "acme/tiny", "--download"], &ASK[..]].concat());
    assert!({ output }.output().unwrap().status.success());
}

#[cfg(not(feature = "download"))]
#[test]
fn build_without_downloads_names_the_remedy() {
    let home = tempfile::tempdir().unwrap();
    let output =
        fox(home.path(), &[&["generate", "acme/tiny", "--download"], &ASK[..]].concat()).output();
    assert_eq!(
        words(&output.unwrap()),
        "error: this build cannot download acme/tiny; fetch it with `hf download acme/tiny`, or build fox with \
         `--features download`"
    );
}

#[cfg(feature = "download")]
mod download {
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A server with the routes of huggingface.co that downloads use. Requests without the token are refused; `cut`
    /// bytes into a large answer, the first connection breaks off.
    struct Hub {
        address: String,
        log: Arc<Mutex<Vec<String>>>,
    }

    impl Hub {
        fn start(files: BTreeMap<String, Vec<u8>>, cut: Option<usize>) -> Hub {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = format!("http://{}", listener.local_addr().unwrap());
            let log = Arc::new(Mutex::new(Vec::new()));
            let shared = log.clone();
            std::thread::spawn(move || {
                let mut cut = cut;
                for stream in listener.incoming() {
                    serve(stream.unwrap(), &files, &shared, &mut cut);
                }
            });
            Hub { address, log }
        }
    }

    fn serve(
        mut stream: TcpStream,
        files: &BTreeMap<String, Vec<u8>>,
        log: &Mutex<Vec<String>>,
        cut: &mut Option<usize>,
    ) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let Some(Ok(request)) = lines.next() else { return };
        let headers: Vec<String> =
            lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
        let header = |name: &str| {
            let found = headers
                .iter()
                .find_map(|line| line.split_once(": ").filter(|h| h.0.eq_ignore_ascii_case(name)));
            found.map(|h| h.1.to_string())
        };
        let path = request.split(' ').nth(1).unwrap().to_string();
        let range = header("range").unwrap_or_default();
        log.lock().unwrap().push(format!("{path} {range}").trim().to_string());
        let mut reply = |status: &str, extra: &str, body: &[u8], length: usize| {
            let head = format!(
                "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{extra}\r\n"
            );
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        };
        if header("authorization").as_deref() != Some("Bearer secret") {
            return reply("401 Unauthorized", "", b"", 0);
        }
        if path == "/api/models/acme/tiny/revision/main" || path == "/api/models/acme/tiny" {
            let siblings: Vec<_> =
                files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
            let body = serde_json::json!({ "siblings": siblings, "sha": "abc123" }).to_string();
            return reply(
                "200 OK",
                "content-type: application/json\r\n",
                body.as_bytes(),
                body.len(),
            );
        }
        let Some(file) =
            path.strip_prefix("/acme/tiny/resolve/main/").and_then(|f| files.get_key_value(f))
        else {
            return reply("404 Not Found", "", b"", 0);
        };
        let (name, bytes) = file;
        let (from, to) = range.trim_start_matches("bytes=").split_once('-').unwrap_or(("0", ""));
        let from: usize = from.parse().unwrap_or(0);
        let to = to.parse().map_or(bytes.len(), |to: usize| (to + 1).min(bytes.len()));
        let extra = format!(
            "etag: \"{name}-1\"\r\nx-repo-commit: abc123\r\ncontent-range: bytes {from}-{}/{}\r\n",
            to.max(1) - 1,
            bytes.len()
        );
        let part = &bytes[from.min(to)..to];
        match cut.filter(|cut| part.len() > *cut) {
            Some(at) => {
                *cut = None;
                reply("206 Partial Content", &extra, &part[..at], part.len());
            }
            None => reply("206 Partial Content", &extra, part, part.len()),
        }
    }

    fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries
            .map(|path| {
                (path.file_name().unwrap().to_str().unwrap().to_string(), fs::read(&path).unwrap())
            })
            .collect()
    }

    #[test]
    fn downloads_resume_and_are_used_offline() {
        let home = tempfile::tempdir().unwrap();
        let source = home.path().join("source");
        small_model(&source, |_| {});
        fs::write(source.join("README.md"), "not needed").unwrap();
        let mut remote = files(&source);
        remote.insert("../evil.safetensors".into(), b"x".to_vec());
        remote.insert("onnx/model.safetensors".into(), b"x".to_vec());
        let hub = Hub::start(remote, Some(1000));
        let generate = |more: &[&str], token: &str| {
            let mut command =
                fox(home.path(), &[&["generate", "acme/tiny"], &ASK[..], more].concat());
            command.env("HF_ENDPOINT", &hub.address).env("HF_TOKEN", token).output().unwrap()
        };
        let refused = words(&generate(&["--download"], "wrong"));
        assert!(
            refused.contains("cannot download acme/tiny") && refused.contains("HF_TOKEN"),
            "{refused}"
        );
        let output = generate(&["--download"], "secret");
        assert!(output.status.success(), "{}", words(&output));
        let log = hub.log.lock().unwrap().clone();
        assert!(log.iter().any(|line| line.ends_with("bytes=1000-")), "resumed: {log:?}");
        assert!(
            !log.iter().any(|line| line.contains("README") || line.contains("evil")),
            "{log:?}"
        );
        assert!(!log.iter().any(|line| line.contains("onnx")), "{log:?}");
        let snapshot = home.path().join("hub/models--acme--tiny/snapshots/abc123");
        for (name, bytes) in files(&source).iter().filter(|(name, _)| name.as_str() != "README.md")
        {
            assert_eq!(&fs::read(snapshot.join(name)).unwrap(), bytes, "{name}");
        }
        // From now on without the server.
        let asked = hub.log.lock().unwrap().len();
        let again = generate(&[], "wrong");
        assert_eq!(again.stdout, output.stdout);
        assert_eq!(hub.log.lock().unwrap().len(), asked);
    }

    #[test]
    fn pickled_weights_are_not_downloaded() {
        let home = tempfile::tempdir().unwrap();
        let names = ["config.json", "pytorch_model.bin"];
        let hub = Hub::start(names.map(|name| (name.to_string(), b"{}".to_vec())).into(), None);
        let mut command = fox(home.path(), &["generate", "acme/tiny", "--download", "-p", "a"]);
        let output =
            command.env("HF_ENDPOINT", &hub.address).env("HF_TOKEN", "secret").output().unwrap();
        assert!(!output.status.success());
        assert!(
            words(&output).contains("acme/tiny has its weights as pytorch_model.bin"),
            "{}",
            words(&output)
        );
        assert_eq!(hub.log.lock().unwrap().len(), 1);
    }
}
