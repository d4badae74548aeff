//! Ranks as threads of one process: what they exchange, and how they notice a loss.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{placement, ranks, rendezvous};
use fox_dist::{Error, Group, Owned, Placement, Rendezvous, free_port, tree_sum};
use fox_tensor::Tensor;

#[test]
fn all_gather_and_broadcast_reach_every_rank() {
    for size in [2, 3, 5] {
        let heard = ranks(size, |group| {
            let own = vec![group.rank() as u8; group.rank() + 1];
            let all = group.all_gather(&own).unwrap();
            let root = group.broadcast(size - 1, &own).unwrap();
            group.leave().unwrap();
            (all, root)
        });
        let all: Vec<Vec<u8>> = (0..size).map(|r| vec![r as u8; r + 1]).collect();
        for (rank, (heard, root)) in heard.into_iter().enumerate() {
            assert_eq!(heard, all, "rank {rank}");
            assert_eq!(root, all[size - 1], "rank {rank}");
        }
    }
}

/// Messages of gathers come before those of collectives that were called later.
#[test]
fn gathers_overlap_other_collectives() {
    for size in [2, 3] {
        let found = ranks(size, |group| {
            let (device, rank) = (fox_tensor::Device::naive(), group.rank());
            let tensors = (0..7usize).map(|i| {
                let owner = i % size;
                let values = vec![i as f32; i + 1];
                let own = device.from_f32(&values, [i + 1]).unwrap();
                (owner, if owner == rank { own } else { Tensor::absent([i + 1], &device) })
            });
            let gathers = group.begin_gather(tensors.collect()).unwrap();
            let numbers = group.all_numbers(&[rank as f64]).unwrap();
            assert_eq!(numbers, (0..size).map(|r| r as f64).collect::<Vec<_>>());
            let moved = group.transfer(size - 1, 0, &[rank as u8]).unwrap();
            assert_eq!(moved, (rank == 0).then(|| vec![(size - 1) as u8]));
            group.wait_for_gathers().unwrap();
            let values = gathers
                .into_iter()
                .map(|gather| group.finish_gather(gather).unwrap().to_f32().unwrap());
            let values: Vec<Vec<f32>> = values.collect();
            group.leave().unwrap();
            values
        });
        let want: Vec<Vec<f32>> = (0..7).map(|i| vec![i as f32; i + 1]).collect();
        found.into_iter().for_each(|values| assert_eq!(values, want));
    }
}

#[test]
fn any_is_true_if_one_rank_is() {
    let answers = ranks(3, |group| {
        let one = group.any(group.rank() == 1).unwrap();
        let none = group.any(false).unwrap();
        group.leave().unwrap();
        (one, none)
    });
    assert_eq!(answers, [(true, false); 3]);
}

#[test]
fn reduces_to_owners_and_broadcasts() {
    let value = |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 1000) as f32 / 7.0;
    // Large enough that both directions fill the system's buffers at once.
    let len = 300_000;
    let results = ranks(3, |group| {
        let device = fox_cpu::device();
        let make = |shift: usize| {
            let values: Vec<f32> = (0..len).map(|i| value(group.rank(), i + shift)).collect();
            device.from_f32(&values, [len]).unwrap()
        };
        let (mut a, mut b) = (make(0), make(5));
        let exchange = group.connect(&device).unwrap();
        assert_eq!(exchange.as_deref(), Some("TCP, sent to the owner and added there"));
        let mut both = [Owned { owner: 2, tensor: &mut a }, Owned { owner: 0, tensor: &mut b }];
        group.reduce_to_owners(&mut both).unwrap();
        group.share(&mut both).unwrap();
        group.leave().unwrap();
        (a.to_f32().unwrap(), b.to_f32().unwrap())
    });
    let want = |shift: usize| {
        tree_sum((0..3).map(|r| (0..len).map(|i| value(r, i + shift)).collect()).collect())
    };
    for (a, b) in results {
        assert!(a == want(0) && b == want(5));
    }
}

#[test]
fn group_of_one_works_alone() {
    let group = Group::alone();
    assert_eq!((group.rank(), group.size(), group.is_first()), (0, 1, true));
    assert_eq!(group.all_gather(b"x").unwrap(), [b"x"]);
    assert_eq!(group.broadcast(0, b"y").unwrap(), b"y");
    group.leave().unwrap();
}

#[test]
fn lost_rank_ends_all_waits() {
    let start = Instant::now();
    let errors = ranks(3, |group| match group.rank() {
        1 => None, // its group is dropped without a goodbye
        _ => Some(group.barrier().unwrap_err().to_string()),
    });
    for error in errors.into_iter().flatten() {
        assert!(
            error.starts_with("rank 1 is gone (its connection closed); run the same command"),
            "{error}"
        );
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn failure_reaches_every_rank() {
    let errors = ranks(4, |group| {
        if group.rank() == 2 {
            group.fail("the disk is full");
            return "rank 2 failed: the disk is full".to_string();
        }
        group.barrier().unwrap_err().to_string()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(error.starts_with("rank 2 failed: the disk is full"), "{rank}: {error}");
    }
}

/// Whatever the rank itself is doing: it may wait for its device.
#[test]
fn loss_callbacks_run_before_and_after_a_loss() {
    let heard = ranks(3, |group| {
        if group.rank() == 1 {
            return Vec::new(); // its group is dropped without a goodbye
        }
        let (say, hear) = channel();
        for _ in 0..2 {
            let say = say.clone();
            group.on_loss(move |words| say.send(words.to_owned()).unwrap());
        }
        let limit = Duration::from_secs(60);
        let mut heard: Vec<String> = (0..2).map(|_| hear.recv_timeout(limit).unwrap()).collect();
        group.on_loss(move |words| say.send(words.to_owned()).unwrap());
        heard.push(hear.recv_timeout(limit).unwrap());
        heard.push(group.loss().unwrap());
        heard
    });
    for words in [&heard[0], &heard[2]] {
        assert_eq!(words.len(), 4);
        assert!(words.iter().all(|w| w == "rank 1 is gone (its connection closed)"), "{words:?}");
    }
}

#[test]
fn leaving_is_not_reported_as_loss() {
    let results = ranks(2, |group| {
        let left = group.leave();
        // The other may be gone by now.
        std::thread::sleep(Duration::from_millis(50 * group.rank() as u64));
        left.is_ok()
    });
    assert_eq!(results, [true, true]);
}

#[test]
fn rejects_ranks_with_another_recipe_or_size() {
    let port = free_port().unwrap();
    let join = |rank: usize, size: usize, recipe: &str| {
        Group::join(&placement(rank, size, port), &rendezvous(recipe)).unwrap_err().to_string()
    };
    for (size, recipe, words) in [
        (2, "b", "rank 1 has another recipe than rank 0 (b and a); give all ranks the same"),
        (3, "a", "rank 1 has a world size of 3 and rank 0 of 2; start all ranks by one command"),
    ] {
        std::thread::scope(|scope| {
            let first = scope.spawn(|| join(0, 2, "a"));
            assert_eq!(join(1, size, recipe), words);
            assert_eq!(first.join().unwrap(), words);
        });
    }
}

#[test]
fn check_same_rejects_different_data() {
    let errors = ranks(3, |group| {
        group.check_same("x", "other data", "use the same").unwrap();
        let own = if group.rank() == 2 { "b" } else { "a" };
        let error = group.check_same(own, "other data", "use the same").unwrap_err();
        // A group that is dropped now would be a lost rank to those that still compare.
        group.leave().unwrap();
        error.to_string()
    });
    for error in errors {
        assert_eq!(error, "rank 2 has other data than rank 0 (b and a); use the same");
    }
}

/// Data links are of the same kind as the address that the ranks meet at.
#[test]
fn ranks_connect_over_ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        return; // a machine without them
    }
    let port = free_port().unwrap();
    let meet = |rank: usize| {
        let place = Placement { host: "::1".into(), ..placement(rank, 3, port) };
        let group = Group::join(&place, &rendezvous("a")).unwrap();
        let all = group.all_gather(&[rank as u8]).unwrap();
        group.leave().unwrap();
        all
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || meet(rank))).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), [[0], [1], [2]]);
        }
    });
}

#[test]
fn names_taken_port_and_missing_rank_zero() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Group::join(&placement(0, 2, port), &rendezvous("a")).unwrap_err();
    assert!(matches!(error, Error::Listen { .. }), "{error}");
    assert!(error.to_string().contains("give another port with FOX_PORT"), "{error}");
    // An address for documents, which no machine has.
    let elsewhere = Placement { host: "192.0.2.1".into(), ..placement(0, 2, port) };
    let error = Group::join(&elsewhere, &rendezvous("a")).unwrap_err().to_string();
    assert!(
        error.ends_with("; set MASTER_ADDR to an address of its machine, the same for all ranks"),
        "{error}"
    );
    let short = Rendezvous { limit: Duration::from_millis(200), ..rendezvous("a") };
    let error = Group::join(&placement(1, 2, free_port().unwrap()), &short).unwrap_err();
    assert!(error.to_string().starts_with("rank 1 found no rank 0 at 127.0.0.1:"), "{error}");
}

#[test]
fn measures_link_speed() {
    let speeds = ranks(3, |group| {
        let speed = group.link_speed(&fox_cpu::device()).unwrap();
        group.leave().unwrap();
        speed.unwrap()
    });
    // Bytes per second of 16 MiB over the loopback interface: more than a megabyte, also on a busy machine.
    assert!(speeds[0] > 1e6 && speeds[0] < 1e13, "{}", speeds[0]);
    assert_eq!((speeds[1], speeds[2]), (speeds[0], speeds[0]), "all know the same figure");
    assert_eq!(Group::alone().link_speed(&fox_cpu::device()).unwrap(), None);
}
