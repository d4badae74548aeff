//! Every op refuses wrong operands with an error when it is called directly; see `fox_tensor::cases`.

use fox_cpu::Level;
use fox_cpu::Options;
use fox_tensor::Device;
use fox_tensor::cases::refuse_wrong_operands;

#[test]
fn wrong_operands_are_errors() {
    for level in Level::available() {
        let device =
            fox_cpu::device_with(Options { level: Some(level), ..Options::default() }).unwrap();
        let outcome =
            refuse_wrong_operands(&device, &[fox_cpu::device(), Device::naive()]).unwrap();
        assert_eq!(outcome.accepted, [""; 0], "{}", level.name());
        assert!(outcome.calls > 1000, "{}", outcome.calls);
    }
}
