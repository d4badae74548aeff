//! Rank and world size from the environment of a launcher.

use crate::{Error, Result};

/// The default port of rank 0.
const PORT: u16 = 29_512;

/// The largest world size: one beyond it is a mistake, and would exhaust the memory.
const MAX_RANKS: usize = 1 << 16;

/// Rank, world size and address of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Number of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Number of this process on its machine, from 0: which GPU it takes.
    pub local_rank: usize,
    /// Number of processes on its machine, as far as the launcher says it; else all of them.
    pub local_size: usize,
    /// The machine of rank 0.
    pub host: String,
    /// Where rank 0 listens.
    pub port: u16,
    /// Who says so.
    pub launcher: &'static str,
}

/// The names under which a launcher gives the invariants.
struct Names {
    launcher: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

const LAUNCHERS: [Names; 3] = [
    Names {
        launcher: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
    },
    Names {
        launcher: "mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Names {
        launcher: "srun",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
    },
];

impl Placement {
    /// The place that the environment describes; `None` for a process that was started alone.
    ///
    /// # Errors
    /// Variables that are incomplete or contradict each other.
    pub fn from_env() -> Result<Option<Placement>> {
        Self::read(&|name| std::env::var(name).ok())
    }

    fn read(var: &dyn Fn(&str) -> Option<String>) -> Result<Option<Placement>> {
        let started = |names: &&Names| match names.launcher {
            // A batch script itself has SLURM_PROCID too, without being one of several.
            "srun" => var("SLURM_STEP_ID").is_some() && var(names.rank).is_some(),
            _ => var(names.rank).is_some(),
        };
        let Some(names) = LAUNCHERS.iter().find(started) else { return Ok(None) };
        let rank = number(var, names.rank)?;
        let size = number(var, names.size)?;
        if size > MAX_RANKS {
            let detail = format!("is {size}; at most {MAX_RANKS} ranks can run together");
            return Err(Error::Environment { variable: names.size.into(), detail });
        }
        if rank >= size {
            let detail = format!("is {rank}, but {} says that there are {size} ranks", names.size);
            return Err(Error::Environment { variable: names.rank.into(), detail });
        }
        if size == 1 {
            return Ok(None);
        }
        let local_rank = number(var, names.local_rank)?;
        let local_size = match var(names.local_size) {
            Some(_) => number(var, names.local_size)?.max(1),
            None => size,
        };
        let (host, port, launcher) = (host(var, names, size)?, port(var)?, names.launcher);
        Ok(Some(Placement { rank, size, local_rank, local_size, host, port, launcher }))
    }

    /// Host and port of rank 0.
    pub fn address(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

fn number(var: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<usize> {
    let wrong = |detail| Error::Environment { variable: name.to_string(), detail };
    let text = var(name).ok_or_else(|| {
        wrong("is not set, although the process was started as one of several".into())
    })?;
    text.trim().parse().map_err(|_| wrong(format!("is `{text}`, not a number from 0 on")))
}

/// The machine of rank 0.
fn host(var: &dyn Fn(&str) -> Option<String>, names: &Names, size: usize) -> Result<String> {
    if let Some(host) = var("MASTER_ADDR").filter(|host| !host.is_empty()) {
        return Ok(host);
    }
    let one_machine = var("OMPI_COMM_WORLD_LOCAL_SIZE").and_then(|n| n.parse().ok()) == Some(size);
    match names.launcher {
        "mpirun" if one_machine => Ok("127.0.0.1".into()),
        "srun" => {
            let list = var("SLURM_STEP_NODELIST").or_else(|| var("SLURM_JOB_NODELIST"));
            list.as_deref().and_then(first_host).ok_or_else(|| Error::Environment {
                variable: "SLURM_STEP_NODELIST".into(),
                detail: "does not name a machine; set MASTER_ADDR to that of rank 0".into(),
            })
        }
        _ => Err(Error::Environment {
            variable: "MASTER_ADDR".into(),
            detail: "is not set; set it to the machine of rank 0".into(),
        }),
    }
}

/// The first of a list such as `gpu[003-010,12],login`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let mut host = list[..end].to_string();
    if let Some(range) = list[end..].strip_prefix('[') {
        host.extend(range.chars().take_while(char::is_ascii_digit));
    }
    (!host.is_empty()).then_some(host)
}

/// torchrun listens at MASTER_PORT itself, so the ranks meet one above it, or below the last one.
fn port(var: &dyn Fn(&str) -> Option<String>) -> Result<u16> {
    let read = |name: &str| match var(name) {
        None => Ok(None),
        Some(text) => match text.trim().parse::<u16>() {
            // At port 0 the system chooses one, which the others do not know.
            Ok(port @ 1..) => Ok(Some(port)),
            _ => Err(Error::Environment {
                variable: name.to_string(),
                detail: format!("is `{text}`, not a port from 1 to 65535"),
            }),
        },
    };
    if let Some(port) = read("FOX_PORT")? {
        return Ok(port);
    }
    let elastic = var("TORCHELASTIC_RUN_ID").is_some();
    Ok(match read("MASTER_PORT")? {
        None => PORT,
        Some(port) if !elastic => port,
        Some(port) => port.checked_add(1).unwrap_or(port - 1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Option<Placement>> {
        Placement::read(&|name| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        })
    }

    fn place(rank: usize, size: usize, local: usize, address: &str, who: &str) -> Placement {
        let (host, port) = address.rsplit_once(':').unwrap();
        let launcher = LAUNCHERS.iter().find(|n| n.launcher == who).unwrap().launcher;
        let (host, port) = (host.to_string(), port.parse().unwrap());
        let local_size = if who == "mpirun" { 2 } else { size };
        Placement { rank, size, local_rank: local, local_size, host, port, launcher }
    }

    const TORCH: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29400"),
        ("TORCHELASTIC_RUN_ID", "none"),
    ];

    #[test]
    fn reads_every_launcher() {
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None, "alone");
        assert_eq!(read(&TORCH).unwrap(), Some(place(3, 8, 1, "node7:29401", "torchrun")));
        assert_eq!(read(&TORCH[..5]).unwrap().unwrap().port, 29400);
        let own = [&TORCH[..], &[("FOX_PORT", "1234")]].concat();
        assert_eq!(read(&own).unwrap().unwrap().port, 1234);
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert_eq!(read(&mpi).unwrap(), Some(place(1, 2, 1, "127.0.0.1:29512", "mpirun")));
        let mut two_machines = mpi;
        two_machines[3].1 = "1";
        let error = read(&two_machines).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR is not set; set it to the machine of rank 0"));
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_LOCALID", "5"),
            ("SLURM_STEP_NODELIST", "gpu[003-004,9]"),
        ];
        assert_eq!(read(&slurm).unwrap(), None, "the batch script itself");
        let step = [&slurm[..], &[("SLURM_STEP_ID", "0")]].concat();
        assert_eq!(read(&step).unwrap(), Some(place(5, 16, 5, "gpu003:29512", "srun")));
    }

    #[test]
    fn rejects_contradicting_variables() {
        let mut vars = TORCH;
        vars[0].1 = "8";
        let error = read(&vars).unwrap_err().to_string();
        assert!(error.contains("RANK is 8, but WORLD_SIZE says that there are 8 ranks"), "{error}");
        vars[0].1 = "1";
        vars[1].1 = "1000000000";
        let error = read(&vars).unwrap_err().to_string();
        assert!(error.ends_with("WORLD_SIZE is 1000000000; at most 65536 ranks can run together"));
        vars[1].1 = "8";
        vars[0].1 = "two";
        assert!(read(&vars).unwrap_err().to_string().contains("RANK is `two`, not a number"));
        let error = read(&[("RANK", "1")]).unwrap_err().to_string();
        assert!(error.contains("WORLD_SIZE is not set"), "{error}");
        vars = TORCH;
        vars[4].1 = "70000";
        assert!(read(&vars).unwrap_err().to_string().contains("MASTER_PORT is `70000`"));
        vars[4].1 = "65535";
        assert_eq!(read(&vars).unwrap().unwrap().port, 65534);
        let zero = [&TORCH[..], &[("FOX_PORT", "0")]].concat();
        let error = read(&zero).unwrap_err().to_string();
        assert!(error.contains("FOX_PORT is `0`, not a port from 1 to 65535"), "{error}");
        vars[3].1 = "";
        assert!(read(&vars).unwrap_err().to_string().contains("MASTER_ADDR is not set"));
    }

    #[test]
    fn first_host_of_slurm_list() {
        for (list, want) in [
            ("a,b", Some("a")),
            ("gpu[003-010,12],login", Some("gpu003")),
            ("n[7]", Some("n7")),
            ("solo", Some("solo")),
            ("", None),
        ] {
            assert_eq!(first_host(list).as_deref(), want, "{list}");
        }
    }
}
