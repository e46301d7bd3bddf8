//! Companions: parameters that are made together with another one, as the scales of an encoded weight are. They follow it
//! in the plan's order.

use super::{Form, Param, Plan};

impl Plan {
    /// The parameter that one is made together with: of scales, the encoded parameter that they belong to; of any other,
    /// itself.
    pub fn made_with(&self, index: u32) -> u32 {
        match self.params[index as usize].form {
            Form::Plain | Form::Encoded { .. } | Form::Kept(_) => index,
            Form::Scales { of, .. } => of,
        }
    }

    /// Leaves the parameters that `wanted` accepts and whatever is made together with one of them. What has no meaning
    /// without files goes: the files, and parameters that are decoded in one pass with an earlier one.
    pub(crate) fn narrow(&mut self, wanted: impl Fn(&Param) -> bool) {
        let made_with: Vec<u32> = (0..self.params.len() as u32).map(|index| self.made_with(index)).collect();
        let mut chosen = vec![false; self.params.len()];
        for (param, first) in self.params.iter().zip(&made_with) {
            chosen[*first as usize] |= wanted(param);
        }
        let stays: Vec<bool> = made_with.iter().map(|first| chosen[*first as usize]).collect();
        let count = |before: &mut u32, stays: &bool| {
            let index = *before;
            *before += u32::from(*stays);
            Some(index)
        };
        let now: Vec<u32> = stays.iter().scan(0, count).collect();
        let mut each = stays.iter().copied();
        self.params.retain(|_| each.next().unwrap_or(false));
        for param in &mut self.params {
            match &mut param.form {
                Form::Plain | Form::Kept(_) => {}
                Form::Encoded { scales: link, .. } | Form::Scales { of: link, .. } => *link = now[*link as usize],
            }
            param.joins = None;
        }
        self.files.clear();
    }
}
