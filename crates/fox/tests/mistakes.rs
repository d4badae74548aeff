//! Invalid command lines: each prints a one-sentence error, exits with a non-zero code and changes no file.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Exit codes: an error, and invalid usage.
const REFUSED: i32 = 1;
const USAGE: i32 = 2;

/// The command line, its exit code, and a substring of its error.
#[rustfmt::skip] // a row per line
const MISTAKES: &[(&str, i32, &str)] = &[
    ("nosuch", USAGE, "unrecognized subcommand 'nosuch'"),
    // Recipes.
    ("train", USAGE, "<RECIPE>"),
    ("train nosuch", REFUSED, "built-in recipe (`fox train --list` shows all)"),
    ("train tiny-fox-pr", REFUSED, "did you mean `tiny-fox-pro`?"),
    ("train tiny-fox-pro+nosuch", REFUSED, "unknown variant `nosuch`"),
    ("train tiny-fox-pro+rop", REFUSED, "did you mean `rope`?"),
    ("train syntax.toml", REFUSED, "syntax.toml is not valid TOML"),
    ("train key.toml", REFUSED, "did you mean `training.tokens`?"),
    ("train sizes.toml", REFUSED, "`model` is missing"),
    ("train missing.toml", REFUSED, "cannot read missing.toml"),
    ("train tiny-fox-pro --set training.tokens", REFUSED, "write key=value"),
    ("train tiny-fox-pro --set training.tokens=many", REFUSED, "`training.tokens` does not fit"),
    ("train tiny-fox-pro --set training.tokens=-5", REFUSED, "`training.tokens` does not fit"),
    ("train tiny-fox-pro --set training.tokens=0", REFUSED, "must be at least 1"),
    ("train tiny-fox-pro --set training.nosuch=1", REFUSED, "unknown key `training.nosuch`"),
    ("train tiny-fox-pro --set training.batch=0", REFUSED, "`training.batch` must be at least 1"),
    ("train tiny-fox-pro --set training.ema=2", REFUSED, "`training.ema` must be between 0 and 1"),
    ("train tiny-fox-pro --set training.reduction=ring", REFUSED, "`running` or `tree`"),
    ("train tiny-fox-pro --set training.pruning=5", REFUSED, "a negative number"),
    ("train tiny-fox-pro --set optimizer.peak_lr=-1", REFUSED, "`optimizer.peak_lr`"),
    ("train tiny-fox-pro --set optimizer.peak_lr=nan", REFUSED, "`optimizer.peak_lr`"),
    ("train tiny-fox-pro --set optimizer.name=sgdd", REFUSED, "there are adamw and muon"),
    ("train tiny-fox-pro --set schedule.warmup_tokens=9e9", REFUSED, "before its learning rate is reached"),
    ("train tiny-fox-pro --set schedule.decay=steps", REFUSED, "expected one of `cosine`"),
    ("train tiny-fox-pro --set evaluation.weights=ema", REFUSED, "set training.ema"),
    ("train tiny-fox-pro --set evaluation.length=0", REFUSED, "`evaluation.length`"),
    ("train tiny-fox-pro --set model.num_heads=3", REFUSED, "does not divide `hidden_size`"),
    ("train tiny-fox-pro --set model.hidden_size=0", REFUSED, "must be between 1 and"),
    ("train tiny-fox-pro --set model.hiden_size=64", REFUSED, "did you mean `model.hidden_size`?"),
    ("train tiny-fox-pro --set data.sequence_length=0", REFUSED, "must be between 1 and 2^30"),
    ("train tiny-fox-pro --set data.synthetic.actions=0", REFUSED, "must be at least 2"),
    ("train tiny-fox-pro --set data.synthetic.octaves=99", REFUSED, "must be at most 40"),
    ("train task-mqar --set data.task.name=mqqr", REFUSED, "did you mean `mqar`?"),
    ("train task-mqar --set data.task.name=nosuch", REFUSED, "the tasks are mqar"),
    ("train run", REFUSED, "run is a run, not a recipe"),
    ("train model", REFUSED, "model is a checkpoint, not a recipe"),
    ("train text.txt", REFUSED, "text.txt is data, not a recipe; train on it with --data text.txt"),
    ("train data", REFUSED, "data is data, not a recipe; train on it with --data data"),
    ("train missing.txt", REFUSED, "missing.txt does not exist; a text to train on is given with --data"),
    ("train tiny-fox-pro --set lr=1", REFUSED, "did you mean `optimizer.peak_lr`?"),
    ("train tiny-fox-pro --set learning_rate=1", REFUSED, "did you mean `optimizer.peak_lr`?"),
    ("train tiny-fox-pro --set training.lr=1", REFUSED, "did you mean `optimizer.peak_lr`?"),
    ("train tiny-fox-pro --set tokens=1e6", REFUSED, "did you mean `training.tokens`?"),
    ("train tiny-fox-pro --set batch_size=8", REFUSED, "did you mean `training.batch`?"),
    ("train tiny-fox-pro --set seq_len=8", REFUSED, "did you mean `data.sequence_length`?"),
    ("train tiny-fox-pro --set epochs=2", REFUSED, "did you mean `data.epochs`?"),
    ("train tiny-fox-pro --set seed=2", REFUSED, "did you mean `training.seed`?"),
    ("train tiny-fox-pro --set dropout=0.1", REFUSED, "did you mean `training.dropout`?"),
    ("train tiny-fox-pro --set training.dropout=1", REFUSED, "at least 0 and below 1, e.g. 0.1"),
    ("train tiny-fox-pro --set training.dropout=nan", REFUSED, "at least 0 and below 1, e.g. 0.1"),
    ("train tiny-fox-pro --set training.gate_init=wide", REFUSED, "\"published\", \"spread\" or"),
    ("train tiny-fox-pro --set training.gate_init=[64,1]", REFUSED, "the shortest first"),
    ("train tiny-transformer --set training.gate_init=spread", REFUSED, "has no data-dependent forget gates"),
    ("train tiny-fox-pro --set =3", REFUSED, "write key=value, e.g. training.tokens=1000000"),
    ("train tiny-fox-pro --tokens -5", USAGE, "at least 1, e.g. 3000000 or 3e6"),
    ("train tiny-fox-pro --list --json", USAGE, "cannot be used with"),
    ("train tiny-fox-pro --threads -1", USAGE, "a number from 1 to 4096"),
    // Dry runs.
    ("train tiny-fox-pro --dry-run --list", USAGE, "cannot be used with"),
    ("train tiny-fox-pro --dry-run --set training.batch=0", REFUSED, "`training.batch` must be"),
    ("train tiny-fox-pro --dry-run --data missing", REFUSED, "missing does not exist"),
    ("train --dry-run --data empty.txt", REFUSED, "too few to learn from"),
    ("train --dry-run --data - --out new3", REFUSED, "does not read the standard input"),
    // Data and folders of training.
    ("train tiny-fox-pro --data missing", REFUSED, "missing does not exist"),
    ("train --data missing.txt", REFUSED, "missing.txt does not exist"),
    ("train --data empty.txt", REFUSED, "empty.txt holds no documents"),
    ("train --data lines.jsonl --out tried", REFUSED, "lines.jsonl line 2 has no text field"),
    ("train --data picture.png --out tried", REFUSED, "no known corpus ending"),
    ("train --data photos --out tried", REFUSED, "photos holds no text, only 1 .jpg"),
    ("train tiny-fox-pro --tokens 0", USAGE, "at least 1, e.g. 3000000 or 3e6"),
    ("train tiny-fox-pro --tokens many", USAGE, "a whole number of tokens"),
    ("train tiny-fox-pro --tokens 1e6 --epochs 2 --data text.txt", USAGE, "cannot be used with"),
    ("train tiny-fox-pro --epochs 2", USAGE, "--data"),
    ("train tiny-fox-pro --epochs 0 --data text.txt", USAGE, "a number above 0"),
    ("train tiny-fox-pro --lr 0", USAGE, "a number above 0, e.g. 1e-3"),
    ("train tiny-fox-pro --batch 0", USAGE, "--batch"),
    ("train tiny-transformer --baseline", REFUSED, "has no Transformer to compare with"),
    ("watch missing", REFUSED, "missing holds no run of fox"),
    ("watch rum", REFUSED, "did you mean run?"),
    ("watch run --out text.txt/page.html", REFUSED, "text.txt"),
    ("train --data run --out tried", REFUSED, "run is a run, not data"),
    ("train --data model --out tried", REFUSED, "model is a checkpoint, not data"),
    ("train --data text.txt --out run", REFUSED, "run holds another run (it was not started"),
    ("train --data text.txt --out model", REFUSED, "holds no run of fox; choose another folder (--out)"),
    ("train --data -", REFUSED, "--out"),
    ("train --data - --out new2", REFUSED, "the standard input is empty"),
    ("train tiny-fox-pro --data data --out tried --set data.epochs=1", REFUSED, "batches, before the run does"),
    ("train tiny-fox-pro --data data --tokenizer gpt2", REFUSED, "--tokenizer is for text"),
    ("train tiny-fox-pro --tokenizer gpt2", USAGE, "--data"),
    ("train tiny-fox-pro --set data.tokenizer=gpt2 --data data", REFUSED, "tokenizer"),
    ("train tiny-fox-pro --out run", REFUSED, "run holds another run"),
    ("train tiny-fox-pro --out text.txt", REFUSED, "holds no run of fox; choose another folder (--out)"),
    ("train tiny-fox-pro --out model", REFUSED, "holds no run of fox; choose another folder (--out)"),
    ("train tiny-fox-pro --device tpu", USAGE, "possible values: auto, cpu, cuda, naive"),
    ("train tiny-fox-pro --device cpu --threads 0", USAGE, "a number from 1 to 4096"),
    ("train tiny-fox-pro --device cpu --simd sse9", REFUSED, "--simd sse9"),
    ("train tiny-fox-pro --export new", USAGE, "--out <DIR>"),
    ("train --export new --out missing", REFUSED, "missing holds no run of fox"),
    ("train --export new --out rum", REFUSED, "did you mean run?"),
    ("train --export new --out run/export", REFUSED, "is part of the run"),
    ("train --export text.txt --out run", REFUSED, "is not an empty folder"),
    ("train --export new --out run --weights ema", REFUSED, "keeps no average of the weights"),
    // Preparation.
    ("prepare missing new", REFUSED, "missing does not exist"),
    ("prepare empty.txt new", REFUSED, "empty.txt holds no documents"),
    ("prepare lines.jsonl new", REFUSED, "lines.jsonl line 2 has no text field"),
    ("prepare text.txt model", REFUSED, "model is not empty"),
    ("prepare text.txt new --tokenizer nosuch", REFUSED, "\"nosuch\" is not a tokenizer"),
    ("prepare text.txt new --heldout 2", REFUSED, "2 is not between 0 and 1"),
    ("prepare text.txt new --heldout -1", REFUSED, "-1 is not between 0 and 1"),
    ("prepare text.txt new --threads 0", USAGE, "a number from 1 to 4096"),
    ("prepare text.txt new --heldout-ends 1.5", REFUSED, "1.5 is not between 0 and 1"),
    ("prepare text.txt new --heldout-ends 0.1 --heldout-corpus empty.txt", USAGE, "cannot be used with"),
    ("prepare text.txt new --shard-tokens 0", REFUSED, "at least one token"),
    ("prepare text.txt new --separator=", REFUSED, "an empty text separates nothing"),
    ("prepare text.txt data --tokenizer gpt2", REFUSED, "data holds another preparation"),
    // Invalid models.
    ("eval loss missing", REFUSED, "missing does not exist"),
    ("eval loss rum", REFUSED, "did you mean run?"),
    ("eval loss data", REFUSED, "data has no config.json"),
    ("eval loss unknown", REFUSED, "unknown model_type `gpt5`"),
    ("eval loss cut", REFUSED, "cut/model.safetensors is not a valid safetensors file"),
    ("generate missing -p a", REFUSED, "missing does not exist"),
    ("generate run/checkpoints/step-00000002 -p a", REFUSED, "its model is run/checkpoints/step-00000002/model"),
    ("serve missing", REFUSED, "missing does not exist"),
    ("inspect missing", REFUSED, "missing does not exist"),
    ("inspect run --text missing.txt", REFUSED, "a file, a folder, or several words in quotes"),
    ("inspect run --text=", REFUSED, "the text is empty"),
    ("inspect run --length -5", USAGE, "--length"),
    ("generate run some -p other", USAGE, "cannot be used with"),
    ("generate run -p a --top-p -1", REFUSED, "--top-p"),
    ("generate run -p a --max-tokens -1", USAGE, "--max-tokens"),
    ("compare missing", REFUSED, "missing does not exist"),
    ("convert missing new --to fla", REFUSED, "missing"),
    ("convert model new --to nosuch", USAGE, "possible values"),
    ("verify missing", REFUSED, "missing"),
    ("info nosuch", REFUSED, "`nosuch` is neither a folder nor"),
    ("info fox-pro-125n", REFUSED, "did you mean `fox-pro-125m`?"),
    ("info tiny-fox-pr", REFUSED, "did you mean `tiny-fox-pro`?"),
    ("info rum", REFUSED, "did you mean run?"),
    ("info tiny-fox-pro+rop", REFUSED, "did you mean `rope`?"),
    ("info syntax.toml", REFUSED, "syntax.toml is not valid TOML"),
    ("info missing.toml", REFUSED, "cannot read missing.toml"),
    ("info unknown", REFUSED, "unknown model_type `gpt5`"),
    ("info fox-pro-125m --seq 0", USAGE, "--seq"),
    ("train tiny-fox-pro --init missing --out tried", REFUSED, "folder missing does not exist"),
    ("train tiny-fox-pro --init acme/none", REFUSED, "`fox generate acme/none --download` fetches"),
    ("convert acme/none new --to fla", REFUSED, "the Hugging Face cache has no model of that name"),
    ("retrofit acme/none new", REFUSED, "the Hugging Face cache has no model of that name"),
    ("retrofit model new", REFUSED, "the model has forget gates already"),
    ("retrofit model new --gate-init 9,1", REFUSED, "SHORTEST,LONGEST in tokens, e.g. 8,512"),
    ("convert model model --to fla", REFUSED, "is not an empty folder; choose another folder"),
    ("convert model new --to fla --max-shard-size 0", USAGE, "the size must be above 0"),
    ("verify model", REFUSED, "model has no io.safetensors"),
    ("compare a=run a=model", REFUSED, "two models are called a; give them other names"),
    // Evaluation.
    ("eval loss run --length 0", USAGE, "--length"),
    ("eval loss run --documents 0", USAGE, "--documents"),
    ("eval loss run run", REFUSED, "are the same model"),
    ("eval loss run --split test", USAGE, "possible values: heldout, train"),
    ("eval loss run --split train --data text.txt", REFUSED, "has no training split"),
    ("eval loss run --data missing", REFUSED, "missing does not exist"),
    ("eval loss run --tokenizer nosuch", REFUSED, "\"nosuch\" is not a tokenizer"),
    ("eval loss model", REFUSED, "evaluate it with the tokenizer it was trained with"),
    ("eval needle run --lengths 0", REFUSED, "need 17 tokens, not 0"),
    ("eval needle run --lengths a", USAGE, "--lengths"),
    ("eval needle run --cases 0", REFUSED, "a needle test needs lengths, depths and cases"),
    ("eval needle run --haystack missing", REFUSED, "missing does not exist"),
    ("eval needle run --candidates 1", USAGE, "1 is not in 2..=64"),
    ("eval needle missing --candidates 65", USAGE, "65 is not in 2..=64"),
    ("eval needle run --depths 0", REFUSED, "a needle test needs lengths, depths and cases"),
    ("eval ruler run --lengths 0", USAGE, "a whole number above 0"),
    ("eval ruler missing", REFUSED, "missing does not exist"),
    ("eval boundaries missing --boundary x", REFUSED, "missing does not exist"),
    ("eval ruler run --tasks nosuch", USAGE, "the tasks are niah_single_1, niah_single_2"),
    ("eval ruler run --samples 0", USAGE, "--samples"),
    ("eval ruler run --file missing", REFUSED, "cannot read missing"),
    ("eval ruler run --file text.txt --lengths 64", USAGE, "cannot be used with"),
    ("eval boundaries run", USAGE, "--boundary"),
    ("eval boundaries run --boundary (", REFUSED, "is not a regular expression: unclosed group"),
    (
        "eval boundaries run --boundary nosuch --windows 1 --length 128",
        REFUSED,
        "\"nosuch\" has no match in 64 documents",
    ),
    ("eval accuracy run", REFUSED, "run is not a run of a task"),
    ("eval tasks run --tasks nosuch", REFUSED, "(`fox eval tasks --list` names all)"),
    ("eval tasks run --tasks piqa", REFUSED, "name the folder of piqa.jsonl (--task-data)"),
    ("eval tasks run --tasks piqa --task-data tasks --limit 0", USAGE, "--limit"),
    (
        "eval tasks run --tasks piqa --task-data tasks --shots 2",
        REFUSED,
        "too few rows for 2 examples and a question; ask for fewer (--shots)",
    ),
    ("eval tasks run --tasks wikitext --task-data tasks --shots 1", REFUSED, "ask without them (--shots)"),
    ("eval tasks run --tasks piqa --task-data tasks --shots few", USAGE, "--shots"),
    ("inspect run --heads 9:9", REFUSED, "the model has 2 layers of 4 heads"),
    ("inspect run --heads x", USAGE, "a head is LAYER:HEAD"),
    ("inspect run --text missing", REFUSED, "missing does not exist"),
    ("inspect run --out page.json", REFUSED, "--out page.json is where the numbers go"),
    ("inspect run --out data", REFUSED, "--out data is a folder"),
    ("inspect run --log-pruning-tolerance 3", USAGE, "a negative number"),
    // Generating and serving.
    ("generate run -p a --top-p 2", REFUSED, "--top-p must be above 0"),
    ("generate run -p a --min-p 7", REFUSED, "--min-p must be from 0 to 1"),
    ("generate run -p a --n 0", USAGE, "--n"),
    ("generate run -p a --eviction sometimes", USAGE, "off, safe or a negative number"),
    ("generate run -p a --cache 0", REFUSED, "--cache must be a size in GiB"),
    ("generate run --file missing", REFUSED, "cannot read missing"),
    ("generate model -p a", REFUSED, "name the model's tokenizer with --tokenizer"),
    ("generate run -p a --temperature -1", REFUSED, "--temperature must be 0 or more"),
    ("generate run -p a --seed -1", USAGE, "a whole number from 0 on"),
    ("chat missing", REFUSED, "missing does not exist"),
    ("chat run --temperature -1", REFUSED, "--temperature must be 0 or more"),
    ("chat run --system brief", REFUSED, "has no chat template"),
    ("inspect run --text photos", REFUSED, "photos holds no text, only 1 .jpg"),
    ("serve run --port 99999", USAGE, "--port"),
    ("serve run --max-batch 0", USAGE, "--max-batch"),
    ("serve run --timeout 0", REFUSED, "--timeout 0 leaves no time to answer"),
    ("serve run --drain -1", REFUSED, "--drain must be a number of seconds, not -1"),
    ("serve run --allow-origin nosuch", USAGE, "a scheme and a host"),
    // Many runs.
    ("launch --ranks 0 -- train tiny-fox-pro", USAGE, "--ranks"),
    ("launch -- train tiny-fox-pro", USAGE, "--ranks"),
    ("launch --ranks 2 --gpus 2 -- train tiny-fox-pro", USAGE, "cannot be used with"),
    ("launch --ranks 2 -- nosuch", REFUSED, "fox launch starts"),
    ("launch --gpus 2 -- train tiny-fox-pro --device cpu", REFUSED, "leave --device out"),
    ("sweep nosuch --out new", REFUSED, "neither a file nor a built-in recipe"),
    ("sweep tiny-fox-pro --out new --set training.seed=5..1", REFUSED, "a range is FIRST..LAST"),
    ("sweep tiny-fox-pro --out new --jobs 0", USAGE, "--jobs"),
    ("demo --seeds 0", USAGE, "--seeds"),
    ("demo --seeds -1", USAGE, "--seeds"),
    ("demo --tokens 1.5", USAGE, "a whole number above 0, e.g. 1000000 or 1e6"),
    ("demo --tokens -5", USAGE, "a whole number above 0, e.g. 1000000 or 1e6"),
    ("demo --out text.txt", REFUSED, "text.txt is a file; name a folder with --out"),
    ("reproduce --out text.txt", REFUSED, "text.txt is a file; name a folder with --out"),
    ("reproduce --report missing", REFUSED, "is not a folder of `fox reproduce`"),
    ("reproduce --out new --scale nosuch", REFUSED, "choose from laptop, minutes, small, 125m"),
    ("reproduce", USAGE, "--out"),
    ("reproduce --tokens -1 --dry-run", USAGE, "a whole number above 0"),
    ("reproduce --dry-run --only nosuch", REFUSED, "nosuch"),
    ("demo --length 1", USAGE, "64, 128, 256"),
    // Measuring.
    ("bench attention --head-dim 7", REFUSED, "must be a multiple of 8"),
    ("bench attention --path --head-dim 136", REFUSED, "must be a multiple of 8 up to 128"),
    ("bench attention --acp=100", USAGE, "a negative number"),
    ("bench attention --seq 4000000000", REFUSED, "lower --seq or --batch"),
    ("bench attention --batch 4000000000 --seq 1", REFUSED, "lower --seq or --batch"),
    ("bench attention --heads 3 --kv-heads 2", REFUSED, "must be a multiple of --kv-heads"),
    ("bench capacity run --memory 64,16", USAGE, "the shorter one first"),
    ("bench capacity fox-pro-125m", REFUSED, "say how long heads remember"),
    ("bench capacity transformer-pro-125m --memory 8,9 --eviction off", REFUSED, "nothing to compare"),
    ("selftest --json --verbose", USAGE, "cannot be used with"),
    ("selftest --only nosuch", REFUSED, "no case name contains `nosuch`"),
    ("completions nosh", USAGE, "possible values: bash"),
    ("man text.txt/pages", REFUSED, "cannot write manual pages"),
];

fn fox(dir: &Path, line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fox"))
        .current_dir(dir)
        .env("HF_HOME", dir.join("huggingface"))
        .env_remove("HF_HUB_CACHE")
        .args(line.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// A folder with a run, data, models and texts.
fn sandbox() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("photos")).unwrap();
    let text: String = (0..900).map(|n| format!("On day {n} the fox slept.\n")).collect();
    for (name, text) in [
        ("text.txt", text.as_str()),
        ("empty.txt", ""),
        ("picture.png", "\u{1}\0"),
        ("photos/a.jpg", "\u{1}\0"),
        ("lines.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n"),
        ("syntax.toml", "[model\nhidden = 3"),
        ("key.toml", "extends = \"tiny-fox-pro\"\n[training]\ntoken = 3\n"),
        ("sizes.toml", "[training]\ntokens = 1000\n"),
    ] {
        fs::write(at(name), text).unwrap();
    }
    fs::create_dir(at("tasks")).unwrap();
    let question = "{\"goal\": \"g\", \"sol1\": \"a\", \"sol2\": \"b\", \"label\": 0}\n";
    fs::write(at("tasks/piqa.jsonl"), question.repeat(2)).unwrap();
    fs::write(at("tasks/wikitext.jsonl"), "{\"page\": \"a\"}\n{\"page\": \"b\"}\n").unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/fox_pro");
    for folder in ["model", "cut", "unknown"] {
        fs::create_dir(at(folder)).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(fixture.join(file), at(folder).join(file)).unwrap();
        }
    }
    let weights = fs::read(at("cut/model.safetensors")).unwrap();
    fs::write(at("cut/model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    fs::write(at("unknown/config.json"), "{\"model_type\": \"gpt5\"}").unwrap();
    for line in [
        "prepare text.txt data --tokenizer bytes --heldout-ends 0.1",
        "train tiny-fox-pro --device cpu --out run --quiet --set training.tokens=2048 \
         --set schedule.warmup_tokens=256 --set data.sequence_length=128",
    ] {
        let output = fox(dir.path(), line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    dir
}

/// Every file of a folder and its contents.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(contents(&path)),
            false => drop(files.insert(path.clone(), fs::read(&path).unwrap())),
        }
    }
    files
}

#[test]
fn invalid_commands_report_one_sentence() {
    assert!(MISTAKES.len() >= 221, "{}", MISTAKES.len());
    let dir = sandbox();
    let before = contents(dir.path());
    let mut wrong = String::new();
    for (line, code, part) in MISTAKES {
        let output = fox(dir.path(), line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let sentence = match *code {
            USAGE => said.contains("error: ") || said.contains("Usage: "),
            // The error is the last line; notes may precede it.
            _ => {
                let last = said.trim_end().lines().last().unwrap_or_default();
                last.starts_with("error: ") && last.contains(part)
            }
        };
        if output.status.code() != Some(*code) || !sentence || !said.contains(part) {
            wrong += &format!(
                "fox {line}\n  {:?}, not {code} with {part:?}: {said}\n",
                output.status.code()
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    for place in ["run/data", "model/data"] {
        assert!(
            !dir.path().join(place).exists(),
            "{place} was written into a folder of something else"
        );
    }
    let after = contents(dir.path());
    for (path, bytes) in &before {
        assert!(after.get(path) == Some(bytes), "{} has changed", path.display());
    }
}
