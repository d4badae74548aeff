//! The secret that the ranks of a run share, and message authentication with it.

use std::fmt::{self, Debug};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::{Error, Result};

/// A text that only the ranks of one run know. Without one, ranks are not authenticated.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// The environment variable that holds the secret; `fox launch` sets it.
    pub const VARIABLE: &str = "FOX_RENDEZVOUS_SECRET";
    /// The environment variable that names a file which holds it.
    pub(crate) const FILE_VARIABLE: &str = "FOX_RENDEZVOUS_SECRET_FILE";

    /// A secret from the system's random numbers, as text.
    ///
    /// # Errors
    /// A system without random numbers.
    pub fn random() -> Result<Secret> {
        let text = nonce()?.iter().chain(&nonce()?).map(|byte| format!("{byte:02x}")).collect();
        Ok(Secret(String::into_bytes(text)))
    }

    /// The secret of the environment; an empty one without it.
    ///
    /// # Errors
    /// An empty variable, a file that cannot be read or is empty.
    pub fn from_env() -> Result<Secret> {
        Self::read(&|name| std::env::var(name).ok())
    }

    fn read(var: &dyn Fn(&str) -> Option<String>) -> Result<Secret> {
        let (variable, text) = match (var(Self::VARIABLE), var(Self::FILE_VARIABLE)) {
            (Some(text), _) => (Self::VARIABLE, Ok(text)),
            (None, Some(path)) => (Self::FILE_VARIABLE, std::fs::read_to_string(&path)),
            (None, None) => return Ok(Secret::default()),
        };
        let wrong = |detail: String| Error::Environment { variable: variable.into(), detail };
        let text =
            text.map_err(|cause| wrong(format!("names a file that cannot be read: {cause}")))?;
        match text.trim() {
            "" => Err(wrong("holds no secret; give all ranks the same text".into())),
            secret => Ok(Secret(secret.into())),
        }
    }

    /// The text, for the environment of other processes.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    /// Whether there is one.
    pub fn is_set(&self) -> bool {
        !self.0.is_empty()
    }

    /// A key for the messages of one connection phase: the secret and what rank 0 has drawn for this run.
    pub(crate) fn with(&self, token: &Nonce) -> Secret {
        Secret([&self.0[..], token].concat())
    }

    fn mac(&self, nonce: &Nonce, body: &str) -> Option<Hmac<Sha256>> {
        let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(&self.0).ok()?;
        mac.update(nonce);
        mac.update(body.as_bytes());
        Some(mac)
    }

    /// HMAC-SHA256 of a nonce and a message.
    pub(crate) fn sign(&self, nonce: &Nonce, body: &str) -> Vec<u8> {
        self.mac(nonce, body).map(|mac| mac.finalize().into_bytes().to_vec()).unwrap_or_default()
    }

    /// Compares a signature in constant time.
    pub(crate) fn verify(&self, nonce: &Nonce, body: &str, signature: &[u8]) -> bool {
        self.mac(nonce, body).is_some_and(|mac| mac.verify_slice(signature).is_ok())
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Secret(text.into())
    }
}

/// Prints whether there is a secret, never the secret.
impl Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "Secret(..)" } else { "Secret(none)" })
    }
}

/// A number that is used once.
pub(crate) type Nonce = [u8; 16];

pub(crate) fn nonce() -> Result<Nonce> {
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|cause| {
        Error::connection("drawing random numbers")(std::io::Error::other(cause.to_string()))
    })?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_is_read_from_variable_or_file() {
        let read = |vars: &[(&str, &str)]| {
            Secret::read(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
        };
        assert!(!read(&[]).unwrap().is_set());
        let secret = read(&[(Secret::VARIABLE, "a long text\n")]).unwrap();
        assert_eq!(
            (secret.text().as_str(), format!("{secret:?}").as_str()),
            ("a long text", "Secret(..)")
        );
        assert_eq!(
            read(&[(Secret::VARIABLE, " ")]).unwrap_err().to_string(),
            "the environment variable FOX_RENDEZVOUS_SECRET holds no secret; give all ranks the same text"
        );
        let error = read(&[(Secret::FILE_VARIABLE, "/nowhere/secret")]).unwrap_err().to_string();
        assert!(
            error.contains("FOX_RENDEZVOUS_SECRET_FILE names a file that cannot be read"),
            "{error}"
        );
        let (a, b) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert!(a != b && a.text().len() == 64);
    }

    #[test]
    fn signatures_depend_on_secret_nonce_and_message() {
        let (secret, nonce) = (Secret(b"Jefe".to_vec()), *b"what do ya want ");
        // RFC 4231, test case 2: the nonce and the message are one text.
        let signature = secret.sign(&nonce, "for nothing?");
        assert_eq!(signature[..4], [0x5b, 0xdc, 0xc1, 0x46]);
        assert!(secret.verify(&nonce, "for nothing?", &signature));
        assert!(!secret.verify(&nonce, "for nothing!", &signature));
        assert!(!secret.verify(&[0; 16], "for nothing?", &signature));
        assert!(!secret.verify(&nonce, "for nothing?", &signature[..31]));
        assert!(!Secret::default().verify(&nonce, "for nothing?", &signature));
        assert!(!secret.with(&nonce).verify(&nonce, "for nothing?", &signature));
    }
}
