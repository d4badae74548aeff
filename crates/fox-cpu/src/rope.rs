//! Cached sines and cosines of the rotary embedding.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use fox_tensor::Rope;

/// `[positions, d / 2]` cosines, then as many sines.
pub struct Table {
    positions: usize,
    half: usize,
    values: Vec<f32>,
}

impl Table {
    fn new(rope: Rope, head_dim: usize, positions: usize) -> Self {
        let half = head_dim / 2;
        let angle = |t: usize, m: usize| t as f64 * rope.frequency(m, head_dim);
        let pairs = || (0..positions).flat_map(|t| (0..half).map(move |m| (t, m)));
        let cosines = pairs().map(|(t, m)| angle(t, m).cos() as f32);
        let sines = pairs().map(|(t, m)| angle(t, m).sin() as f32);
        Table { positions, half, values: cosines.chain(sines).collect() }
    }

    /// Cosines and sines at a position, `[d / 2]` each.
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let (cosines, sines) = self.values.split_at(self.positions * self.half);
        let range = position * self.half..(position + 1) * self.half;
        (&cosines[range.clone()], &sines[range])
    }
}

/// Capacity of the cache. A model has one table or a few; an embedding whose strength changes has one per step.
const CAPACITY: usize = 16;

/// An embedding and a head dim.
type Key = ([u64; 6], usize);

/// Tables by embedding and head dim, which grow with the sequence length.
#[derive(Default)]
pub struct Tables(Mutex<HashMap<Key, Arc<Table>>>);

impl Tables {
    /// A table that covers at least `positions` positions.
    pub fn get(&self, rope: Rope, head_dim: usize, positions: usize) -> Arc<Table> {
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (rope.key(), head_dim);
        if tables.len() >= CAPACITY && !tables.contains_key(&key) {
            tables.clear();
        }
        let entry = tables.entry(key);
        let table = entry.or_insert_with(|| Arc::new(Table::new(rope, head_dim, 0)));
        if table.positions < positions {
            *table = Arc::new(Table::new(rope, head_dim, positions.next_power_of_two()));
        }
        table.clone()
    }
}
