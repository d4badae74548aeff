//! Parquet files: one document per row, its text in one column, or the row as a whole.

use std::fs::File;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::serialized_reader::ReadOptionsBuilder;
use parquet::record::{Field, Row, RowAccessor};
use parquet::schema::types::Type;
use serde_json::Value;

use super::files::CorpusFile;
use super::{Document, DocumentsOfFile, Record, RecordsOfFile};
use crate::error::{Error, Result};

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
    let rows = (0..groups).flat_map(move |group| rows_of(&reader, group, &schema));
    Ok(Box::new(rows.map(move |row| Ok(object(&row.map_err(&bad)?)))))
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

/// The documents of a file; only the column asked for is read.
pub(super) fn documents(file: &CorpusFile, field: &str) -> Result<DocumentsOfFile> {
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
    let path = file.path.clone();
    let field = field.to_owned();
    // Row groups are opened one by one, so that only one is in memory.
    let rows = (0..groups).flat_map(move |group| rows_of(&reader, group, &projection));
    Ok(Box::new(rows.map(move |row| {
        let row = row.map_err(&bad)?;
        match row.get_string(0) {
            Ok(text) => Ok(Document { text: text.clone() }),
            Err(_) if row.get_column_iter().all(|(_, f)| *f == Field::Null) => {
                Ok(Document { text: String::new() })
            }
            Err(_) => Err(Error::MissingField {
                path: path.clone(),
                location: "column of text".into(),
                field: field.clone(),
            }),
        }
    })))
}

type RowResult = std::result::Result<Row, parquet::errors::ParquetError>;

fn rows_of(
    reader: &SerializedFileReader<File>,
    group: usize,
    projection: &Type,
) -> Box<dyn Iterator<Item = RowResult> + Send> {
    let rows = reader.get_row_group(group).and_then(|group| {
        let rows = group.get_row_iter(Some(projection.clone()))?;
        Ok(rows.collect::<Vec<_>>())
    });
    match rows {
        Ok(rows) => Box::new(rows.into_iter()),
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
