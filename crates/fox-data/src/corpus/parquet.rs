//! Parquet files: one document per row, its text in one column, or the row as a whole.

use std::fs::File;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::serialized_reader::ReadOptionsBuilder;
use parquet::record::reader::TreeBuilder;
use parquet::record::{Field, Row, RowAccessor};
use parquet::schema::types::{SchemaDescriptor, Type};
use serde_json::Value;

use super::files::CorpusFile;
use super::jsonl::MAX_LINE_BYTES;
use super::{Document, DocumentsOfFile, Record, RecordsOfFile};
use crate::error::{Error, Result};

/// Rows that are decoded at once. A file of kilobytes can hold rows of gigabytes, so few of them are in memory.
const BATCH: usize = 8;

type Failed = Box<dyn Fn(parquet::errors::ParquetError) -> Error + Send>;

fn open(file: &CorpusFile) -> Result<(SerializedFileReader<File>, Failed)> {
    let path = file.path.clone();
    let bad: Failed =
        Box::new(move |error| Error::Parquet { path: path.clone(), detail: error.to_string() });
    let opened = File::open(&file.path).map_err(Error::io("open", &file.path))?;
    let options = ReadOptionsBuilder::new().build();
    let reader = SerializedFileReader::new_with_options(opened, options).map_err(&bad)?;
    Ok((reader, bad))
}

/// The rows of a file with all their columns.
pub(super) fn records(file: &CorpusFile) -> Result<RecordsOfFile> {
    let (reader, bad) = open(file)?;
    let schema = reader.metadata().file_metadata().schema().clone();
    let groups = reader.num_row_groups();
    let rows = (0..groups).flat_map(move |group| rows_of(&reader, group, &schema)).enumerate();
    let file = file.clone();
    Ok(Box::new(rows.map(move |(number, row)| {
        let row = row.map_err(&bad)?;
        check_size(&file, number, &row, MAX_LINE_BYTES)?;
        Ok(object(&row))
    })))
}

fn object(row: &Row) -> Record {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

/// The JSON value of a field. Dates and decimals are text.
fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(x) => (*x).into(),
        Field::Byte(x) => (*x).into(),
        Field::Short(x) => (*x).into(),
        Field::Int(x) => (*x).into(),
        Field::Long(x) => (*x).into(),
        Field::UByte(x) => (*x).into(),
        Field::UShort(x) => (*x).into(),
        Field::UInt(x) => (*x).into(),
        Field::ULong(x) => (*x).into(),
        Field::Float(x) => (*x).into(),
        Field::Double(x) => (*x).into(),
        Field::Str(x) => x.as_str().into(),
        Field::Bytes(x) => String::from_utf8_lossy(x.data()).into(),
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let entry = |(k, v): &(Field, Field)| match value(k) {
                Value::String(key) => (key, value(v)),
                other => (other.to_string(), value(v)),
            };
            Value::Object(map.entries().iter().map(entry).collect())
        }
        other => other.to_string().into(),
    }
}

/// An error for a row with more text than one document may have.
fn check_size(file: &CorpusFile, number: usize, row: &Row, limit: u64) -> Result<()> {
    let bytes = |(_, field): (&String, &Field)| match field {
        Field::Str(text) => text.len() as u64,
        Field::Bytes(bytes) => bytes.len() as u64,
        _ => 0,
    };
    if row.get_column_iter().map(bytes).sum::<u64>() > limit {
        let place = format!(" row {}", number + 1);
        return Err(Error::DocumentTooLarge { path: file.path.clone(), place, limit });
    }
    Ok(())
}

/// The documents of a file; only the column asked for is read.
pub(super) fn documents(file: &CorpusFile, field: &str) -> Result<DocumentsOfFile> {
    documents_within(file, field, MAX_LINE_BYTES)
}

fn documents_within(file: &CorpusFile, field: &str, limit: u64) -> Result<DocumentsOfFile> {
    let (reader, bad) = open(file)?;
    let schema = reader.metadata().file_metadata().schema();
    let column =
        schema.get_fields().iter().find(|column| column.name() == field).ok_or_else(|| {
            Error::MissingField {
                path: file.path.clone(),
                location: "schema".into(),
                field: field.to_owned(),
            }
        })?;
    let projection = Type::group_type_builder(schema.name())
        .with_fields(vec![Arc::clone(column)])
        .build()
        .map_err(&bad)?;
    let groups = reader.num_row_groups();
    let file = file.clone();
    let field = field.to_owned();
    let rows = (0..groups).flat_map(move |group| rows_of(&reader, group, &projection)).enumerate();
    Ok(Box::new(rows.map(move |(number, row)| {
        let row = row.map_err(&bad)?;
        check_size(&file, number, &row, limit)?;
        match row.get_string(0) {
            Ok(text) => Ok(Document { text: text.clone() }),
            Err(_) if row.get_column_iter().all(|(_, f)| *f == Field::Null) => {
                Ok(Document { text: String::new() })
            }
            Err(_) => Err(Error::MissingField {
                path: file.path.clone(),
                location: "column of text".into(),
                field: field.clone(),
            }),
        }
    })))
}

type RowResult = std::result::Result<Row, parquet::errors::ParquetError>;

/// The rows of a group, decoded as they are asked for.
fn rows_of(
    reader: &SerializedFileReader<File>,
    group: usize,
    projection: &Type,
) -> Box<dyn Iterator<Item = RowResult> + Send> {
    let rows = reader.get_row_group(group).and_then(|group| {
        let schema = Arc::new(SchemaDescriptor::new(Arc::new(projection.clone())));
        TreeBuilder::new().with_batch_size(BATCH).as_iter(schema, &*group)
    });
    match rows {
        Ok(rows) => Box::new(rows),
        Err(error) => Box::new(std::iter::once(Err(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::{Corpus, CorpusOptions};
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    /// Random letters, so that compression does not put them all into one page.
    fn large_rows(path: &std::path::Path) {
        let schema = parse_message_type("message m { required binary text (UTF8); }").unwrap();
        let mut writer = SerializedFileWriter::new(
            File::create(path).unwrap(),
            Arc::new(schema),
            Arc::new(WriterProperties::builder().set_dictionary_enabled(false).build()),
        )
        .unwrap();
        let mut random = fox_base::random::SplitMix64::new(1);
        let mut text = |_| {
            let letters: Vec<u8> =
                (0..64 << 10).map(|_| b'a' + (random.bits() % 26) as u8).collect();
            ByteArray::from(letters)
        };
        let texts: Vec<ByteArray> = (0..64).map(&mut text).collect();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        for text in texts {
            column.typed::<ByteArrayType>().write_batch(&[text], None, None).unwrap();
        }
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
    }

    #[test]
    fn rows_are_decoded_on_demand() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        large_rows(&path);
        let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
        assert_eq!(corpus.documents().filter(Result::is_ok).count(), 64);
        let mut documents = corpus.documents();
        assert_eq!(documents.next().unwrap().unwrap().text.len(), 64 << 10);
        // Half of the only row group disappears after the first row.
        File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
        assert!(documents.any(|document| document.is_err()), "the whole group was in memory");
    }

    #[test]
    fn rejects_oversized_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        large_rows(&path);
        let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
        let file = &corpus.files()[0];
        assert!(documents_within(file, "text", 64 << 10).unwrap().all(|d| d.is_ok()));
        let error = documents_within(file, "text", (64 << 10) - 1).unwrap().next().unwrap();
        let message = error.unwrap_err().to_string();
        assert!(message.contains("row 1 is longer than 65535 bytes; split it"), "{message}");
    }

    #[test]
    fn parquet_documents_keep_row_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        let schema =
            parse_message_type("message m { required int64 id; optional binary text (UTF8); }");
        let mut writer = SerializedFileWriter::new(
            File::create(&path).unwrap(),
            Arc::new(schema.unwrap()),
            Arc::new(WriterProperties::builder().build()),
        )
        .unwrap();
        for texts in [["one", "two"], ["three", "four"]] {
            let mut group = writer.next_row_group().unwrap();
            let mut ids = group.next_column().unwrap().unwrap();
            ids.typed::<Int64Type>().write_batch(&[1, 2, 3], None, None).unwrap();
            ids.close().unwrap();
            let values = texts.map(ByteArray::from);
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&[1, 0, 1]), None).unwrap();
            column.close().unwrap();
            group.close().unwrap();
        }
        writer.close().unwrap();

        let corpus = Corpus::open(folder.path(), CorpusOptions::default()).unwrap();
        let texts: Vec<_> = corpus.documents().map(|d| d.unwrap().text).collect();
        assert_eq!(texts, ["one", "two", "three", "four"]);

        let rows: Vec<_> = corpus.records().map(|row| row.unwrap()).collect();
        assert_eq!(rows.len(), 6);
        assert_eq!((&rows[0]["id"], &rows[0]["text"]), (&1.into(), &"one".into()));
        assert_eq!((&rows[4]["id"], &rows[4]["text"]), (&2.into(), &Value::Null));

        let other = CorpusOptions { text_field: "body".into(), ..CorpusOptions::default() };
        let corpus = Corpus::open(&path, other).unwrap();
        let error = corpus.documents().next().unwrap().unwrap_err();
        assert!(error.to_string().contains("\"body\""), "{error}");

        std::fs::write(&path, "PAR1 nonsense").unwrap();
        let corpus = Corpus::open(&path, CorpusOptions::default()).unwrap();
        let error = corpus.documents().next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Parquet { .. }), "{error}");
    }
}
