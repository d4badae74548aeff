//! The oracle refuses wrong operands with an error when it is called directly.

use fox_tensor::Device;
use fox_tensor::cases::refuse_wrong_operands;
use fox_tensor::naive::Naive;

#[test]
fn wrong_operands_are_errors() {
    for device in [Device::naive(), Device::new(Naive::with_optional_ops())] {
        let outcome = refuse_wrong_operands(&device, &[Device::naive()]).unwrap();
        assert_eq!(outcome.accepted, [""; 0]);
        assert!(outcome.calls > 800, "{}", outcome.calls);
    }
}
